/* The cards, as a file describes them; CUDA_VISIBLE_DEVICES; properties of a card. */
#include "emu.h"

Machine machine;
static int initialised_by; /* number of the process */
static __thread int current_ordinal;

/* 1. The description: see EmulatedMachine.text in autotune/emulator/cards.py. */

static int is(const char *text, const char *word) { return !strcmp(text, word); }

static enum card_state state_named(const char *word) {
  if (is(word, "busy")) return CARD_BUSY;
  if (is(word, "lost")) return CARD_LOST;
  if (is(word, "memoryless")) return CARD_MEMORYLESS;
  if (is(word, "forbidden")) return CARD_FORBIDDEN;
  return CARD_OK;
}

static void set_card_field(Card *card, const char *field, const char *value) {
  long number = strtol(value, NULL, 10);
  if (is(field, "name")) snprintf(card->name, sizeof card->name, "%s", value);
  else if (is(field, "uuid")) snprintf(card->uuid, sizeof card->uuid, "%s", value);
  else if (is(field, "capability")) sscanf(value, "%d.%d", &card->major, &card->minor);
  else if (is(field, "multiprocessors")) card->multiprocessors = number;
  else if (is(field, "shared_kib")) card->shared_kib = number;
  else if (is(field, "l2_mib")) card->l2_mib = number;
  else if (is(field, "clock_khz")) card->clock_khz = number;
  else if (is(field, "bus_bits")) card->bus_bits = number;
  else if (is(field, "nvlink")) card->nvlink = number;
  else if (is(field, "memory_mib")) card->memory = number * MIB;
  else if (is(field, "reserved_mib")) card->reserved = number * MIB;
  else if (is(field, "context_mib")) card->context = number * MIB;
  else if (is(field, "kernels_mib")) card->kernels = number * MIB;
  else if (is(field, "engine_kernels_mib")) card->engine_kernels = number * MIB;
  else if (is(field, "nccl_mib")) card->nccl = number * MIB;
  else if (is(field, "foreign_mib")) card->foreign = number * MIB;
  else if (is(field, "state")) card->state = state_named(value);
}

static void set_machine_field(const char *field, const char *value) {
  int number = atoi(value);
  if (is(field, "driver")) machine.driver_version = number;
  else if (is(field, "runtime")) machine.runtime_version = number;
  else if (is(field, "lag")) machine.lag = number;
  else if (is(field, "hides_processes")) machine.hides_processes = number;
  else if (is(field, "pid_shift")) machine.pid_shift = number;
}

/* The card of a line that begins with this word; NULL for other lines, or without room. */
static Card *new_card(const char *word) {
  int is_card = is(word, "card"), is_sliced = is(word, "sliced"), is_slice = is(word, "slice");
  /* 1. A new GPU, whole or with slices. */
  if ((is_card || is_sliced) && machine.gpus < MAX_CARDS) {
    machine.gpu[machine.gpus].first = machine.cards;
    machine.gpus++;
  }
  int gpu = machine.gpus - 1;
  if (gpu < 0) return NULL;

  /* 2. Its place. */
  Card *card = NULL;
  int is_usable = is_card || is_slice;
  if (is_sliced) card = &machine.gpu[gpu].whole;
  else if (is_usable && machine.cards < MAX_CARDS) card = &machine.card[machine.cards++];
  if (!card) return NULL;
  card->gpu = gpu;
  card->slice = is_slice ? machine.gpu[gpu].slices++ : -1;
  return card;
}

/* One line: a word, then fields `name=value` between tabs. */
static void read_line(char *line) {
  char *position = NULL;
  char *word = strtok_r(line, "\t\n", &position);
  if (!word) return;
  Card *card = new_card(word);
  for (char *field; (field = strtok_r(NULL, "\t\n", &position));) {
    char *value = strchr(field, '=');
    if (!value) continue;
    *value++ = 0;
    if (card) set_card_field(card, field, value);
    else set_machine_field(field, value);
  }
}

__attribute__((constructor(102))) static void read_machine(void) {
  const char *path = getenv("AUTOTUNE_EMULATED_MACHINE");
  if (!path) return;
  FILE *file = fopen(path, "re");
  if (!file) {
    fprintf(stderr, "autotune: the emulated machine %s cannot be read; no GPU is emulated\n", path);
    return;
  }
  char line[1024];
  while (fgets(line, sizeof line, file)) read_line(line);
  fclose(file);
}

/* 2. Cards that this process sees. */

/* The card of a number or of the start of a UUID; -1 without one. */
static int card_named(const char *word) {
  char *end;
  long number = strtol(word, &end, 10);
  int is_number = end != word && !*end;
  if (is_number) return number >= 0 && number < machine.gpus ? machine.gpu[number].first : -1;
  size_t length = strlen(word);
  for (int i = 0; i < machine.cards; i++)
    if (length > 4 && !strncmp(machine.card[i].uuid, word, length)) return i;
  return -1;
}

/* CUDA stops at the first name that is not there. */
static void read_names(const char *names) {
  char copy[1024], *position = NULL;
  snprintf(copy, sizeof copy, "%s", names);
  char *word = strtok_r(copy, ", ", &position);
  while (word && machine.visible < MAX_CARDS) {
    int card = card_named(word);
    if (card < 0) return;
    machine.physical[machine.visible++] = card;
    word = strtok_r(NULL, ", ", &position);
  }
}

/* Where MIG is on, CUDA shows one slice and nothing else. */
static void keep_one_slice(void) {
  for (int i = 0; i < machine.visible; i++)
    if (machine.card[machine.physical[i]].slice >= 0) {
      machine.physical[0] = machine.physical[i];
      machine.visible = 1;
    }
}

/* CUDA reads the variable when it is initialised. */
static void read_visible(void) {
  const char *names = getenv("CUDA_VISIBLE_DEVICES");
  machine.visible = 0;
  if (names) read_names(names);
  else
    for (int i = 0; i < machine.cards; i++) machine.physical[machine.visible++] = i;
  keep_one_slice();
}

int emu_initialise(void) {
  /* Like the real driver's, this state does not survive a fork. */
  if (initialised_by && initialised_by != getpid()) return NOT_INITIALIZED;
  if (!initialised_by) {
    read_visible();
    if (machine.visible) {
      initialised_by = getpid();
      emu_keep_report();
    }
  }
  return machine.visible ? SUCCESS : NO_DEVICE;
}

int emu_is_initialised(void) { return initialised_by == getpid(); }

int emu_visible(void) { return emu_initialise() ? 0 : machine.visible; }

int emu_device(void) { return current_ordinal; }

void emu_set_device(int ordinal) { current_ordinal = ordinal; }

/* 3. Properties of a card. */

const Card *emu_card(int ordinal) {
  int is_visible = ordinal >= 0 && ordinal < machine.visible;
  return &machine.card[is_visible ? machine.physical[ordinal] : 0];
}

void emu_uuid(const Card *card, unsigned char bytes[16]) {
  const char *digit = card->uuid + 4; /* after "GPU-" */
  for (int i = 0; i < 16; i++) {
    unsigned byte = 0;
    if (*digit == '-') digit++;
    if (sscanf(digit, "%2x", &byte) == 1) digit += 2;
    bytes[i] = byte;
  }
}

static int threads_per_multiprocessor(const Card *card) {
  if (card->major == 8 && card->minor) return 1536;
  if (card->major == 7 && card->minor == 5) return 1024;
  return 2048;
}

/* What is not listed is answered with 0: not supported. */
int emu_attribute(const Card *card, int attribute) {
  switch (attribute) {
    /* 1. What cards differ in. */
    case CLOCK_RATE: return card->clock_khz;
    case MULTIPROCESSOR_COUNT: return card->multiprocessors;
    case PCI_BUS_ID: return 0x10 + card->gpu;
    case GLOBAL_MEMORY_BUS_WIDTH: return card->bus_bits;
    case L2_CACHE_SIZE: return card->l2_mib << 20;
    case MAX_PERSISTING_L2_CACHE_SIZE: return (card->l2_mib << 20) / 4 * 3;
    case THREADS_PER_MULTIPROCESSOR: return threads_per_multiprocessor(card);
    case CAPABILITY_MAJOR: return card->major;
    case CAPABILITY_MINOR: return card->minor;
    case SHARED_MEMORY_PER_MULTIPROCESSOR: return card->shared_kib << 10;
    case SHARED_MEMORY_PER_BLOCK_OPTIN: return (card->shared_kib - 1) << 10;
    case CLUSTER_LAUNCH: return card->major >= 9;

    /* 2. What they have in common. */
    case MAX_THREADS_PER_BLOCK:
    case MAX_BLOCK_DIM_X:
    case MAX_BLOCK_DIM_Y: return 1024;
    case MAX_BLOCK_DIM_Z: return 64;
    case MAX_GRID_DIM_X: return 2147483647;
    case MAX_GRID_DIM_Y:
    case MAX_GRID_DIM_Z: return 65535;
    case SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case TOTAL_CONSTANT_MEMORY:
    case REGISTERS_PER_BLOCK:
    case REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case WARP_SIZE: return 32;
    case MAX_PITCH: return 2147483647;
    case TEXTURE_ALIGNMENT: return 512;
    case MEMORY_CLOCK_RATE: return 1215000;
    case ASYNC_ENGINE_COUNT: return 3;
    case BLOCKS_PER_MULTIPROCESSOR: return 32;
    case RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;

    /* 3. What all of them can. */
    case GPU_OVERLAP:
    case CAN_MAP_HOST_MEMORY:
    case CONCURRENT_KERNELS:
    case ECC_ENABLED:
    case UNIFIED_ADDRESSING:
    case STREAM_PRIORITIES_SUPPORTED:
    case GLOBAL_L1_CACHE_SUPPORTED:
    case LOCAL_L1_CACHE_SUPPORTED:
    case MANAGED_MEMORY:
    case CONCURRENT_MANAGED_ACCESS:
    case COMPUTE_PREEMPTION_SUPPORTED:
    case CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case COOPERATIVE_LAUNCH:
    case COOPERATIVE_MULTI_DEVICE_LAUNCH:
    case CAN_FLUSH_REMOTE_WRITES:
    case HOST_REGISTER_SUPPORTED:
    case VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case POSIX_DESCRIPTOR_SUPPORTED:
    case GENERIC_COMPRESSION_SUPPORTED:
    case MAX_ACCESS_POLICY_WINDOW_SIZE:
    case MEMORY_POOLS_SUPPORTED:
    case MEMPOOL_SUPPORTED_HANDLE_TYPES: return 1;
    default: return 0;
  }
}
