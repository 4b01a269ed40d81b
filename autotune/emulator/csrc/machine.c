/* The cards, as a file describes them; CUDA_VISIBLE_DEVICES; what is asked about a card. */
#include "emu.h"

Machine machine;
static int initialised_by;
static __thread int current;

static enum card_state state_of(const char *word) {
  if (!strcmp(word, "busy")) return CARD_BUSY;
  if (!strcmp(word, "lost")) return CARD_LOST;
  if (!strcmp(word, "memoryless")) return CARD_MEMORYLESS;
  return strcmp(word, "forbidden") ? CARD_OK : CARD_FORBIDDEN;
}

static void set_field(Card *card, const char *field, const char *value) {
  long number = strtol(value, NULL, 10);
  if (!strcmp(field, "name")) snprintf(card->name, sizeof card->name, "%s", value);
  else if (!strcmp(field, "uuid")) snprintf(card->uuid, sizeof card->uuid, "%s", value);
  else if (!strcmp(field, "capability")) sscanf(value, "%d.%d", &card->major, &card->minor);
  else if (!strcmp(field, "multiprocessors")) card->multiprocessors = number;
  else if (!strcmp(field, "shared_kib")) card->shared_kib = number;
  else if (!strcmp(field, "l2_mib")) card->l2_mib = number;
  else if (!strcmp(field, "clock_khz")) card->clock_khz = number;
  else if (!strcmp(field, "bus_bits")) card->bus_bits = number;
  else if (!strcmp(field, "nvlink")) card->nvlink = number;
  else if (!strcmp(field, "memory_mib")) card->memory = number * MIB;
  else if (!strcmp(field, "reserved_mib")) card->reserved = number * MIB;
  else if (!strcmp(field, "context_mib")) card->context = number * MIB;
  else if (!strcmp(field, "kernels_mib")) card->kernels = number * MIB;
  else if (!strcmp(field, "nccl_mib")) card->nccl = number * MIB;
  else if (!strcmp(field, "foreign_mib")) card->foreign = number * MIB;
  else if (!strcmp(field, "state")) card->state = state_of(value);
}

/* One line: a word, then fields `name=value` between tabs. */
static void read_line(char *line) {
  char *rest = NULL, *word = strtok_r(line, "\t\n", &rest);
  if (!word) return;
  Card *card = NULL;
  int is_sliced = !strcmp(word, "sliced"), is_slice = !strcmp(word, "slice");
  if ((is_sliced || !strcmp(word, "card")) && machine.gpus < MAX_CARDS) {
    machine.gpu[machine.gpus].first = machine.cards;
    machine.gpus++;
  }
  int gpu = machine.gpus - 1;
  if (is_sliced && gpu >= 0) card = &machine.gpu[gpu].whole;
  else if ((is_slice || !strcmp(word, "card")) && gpu >= 0 && machine.cards < MAX_CARDS) card = &machine.card[machine.cards++];
  if (card) {
    card->gpu = gpu;
    card->slice = is_slice ? machine.gpu[gpu].slices++ : -1;
  }
  for (char *field; (field = strtok_r(NULL, "\t\n", &rest));) {
    char *value = strchr(field, '=');
    if (!value) continue;
    *value++ = 0;
    if (card) set_field(card, field, value);
    else if (!strcmp(field, "driver")) machine.driver_version = atoi(value);
    else if (!strcmp(field, "runtime")) machine.runtime_version = atoi(value);
    else if (!strcmp(field, "lag")) machine.lag = atoi(value);
    else if (!strcmp(field, "hides_processes")) machine.hides_processes = atoi(value);
    else if (!strcmp(field, "pid_shift")) machine.pid_shift = atoi(value);
  }
}

__attribute__((constructor(102))) static void read_machine(void) {
  const char *path = getenv("AUTOTUNE_EMULATED_MACHINE");
  FILE *file = path ? fopen(path, "re") : NULL;
  if (!file) {
    if (path) fprintf(stderr, "autotune: the emulated machine %s cannot be read; no GPU is emulated\n", path);
    return;
  }
  char line[1024];
  while (fgets(line, sizeof line, file)) read_line(line);
  fclose(file);
}

static int card_named(const char *word) {
  char *end;
  long number = strtol(word, &end, 10);
  if (end != word && !*end) return number >= 0 && number < machine.gpus ? machine.gpu[number].first : -1;
  for (int i = 0; i < machine.cards; i++)
    if (!strncmp(machine.card[i].uuid, word, strlen(word)) && strlen(word) > 4) return i;
  return -1;
}

/* Where MIG is on, CUDA shows one slice and nothing else. */
static void keep_one_slice(void) {
  for (int i = 0; i < machine.visible; i++)
    if (machine.card[machine.physical[i]].slice >= 0) {
      machine.physical[0] = machine.physical[i];
      machine.visible = 1;
    }
}

/* CUDA reads the variable when it is initialised, and stops at the first name that is not there. */
static void read_visible(void) {
  const char *named = getenv("CUDA_VISIBLE_DEVICES");
  machine.visible = 0;
  if (!named) {
    for (int i = 0; i < machine.cards; i++) machine.physical[machine.visible++] = i;
    keep_one_slice();
    return;
  }
  char copy[1024], *rest = NULL;
  snprintf(copy, sizeof copy, "%s", named);
  for (char *word = strtok_r(copy, ", ", &rest); word && machine.visible < MAX_CARDS; word = strtok_r(NULL, ", ", &rest)) {
    int card = card_named(word);
    if (card < 0) break;
    machine.physical[machine.visible++] = card;
  }
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

int emu_device(void) { return current; }

void emu_set_device(int ordinal) { current = ordinal; }

const Card *emu_card(int ordinal) {
  int there = ordinal >= 0 && ordinal < machine.visible;
  return &machine.card[there ? machine.physical[ordinal] : 0];
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

/* By cudaDeviceAttr's numbers, which are CUdevice_attribute's. What is not listed is answered with 0: not supported. */
int emu_attribute(const Card *card, int attribute) {
  switch (attribute) {
    case 1: case 2: case 3: return 1024; /* threads of a block; its x and y */
    case 4: return 64;
    case 5: return 2147483647; /* blocks of a grid */
    case 6: case 7: return 65535;
    case 8: return 48 << 10; /* shared memory of a block */
    case 9: case 12: case 82: return 65536; /* constant memory; registers */
    case 10: return 32;                     /* threads of a warp */
    case 11: return 2147483647;
    case 13: return card->clock_khz;
    case 14: return 512;
    case 16: return card->multiprocessors;
    case 33: return 0x10 + card->gpu; /* PCI bus */
    case 36: return 1215000;
    case 37: return card->bus_bits;
    case 38: return card->l2_mib << 20;
    case 39: return card->major == 8 && card->minor ? 1536 : card->major == 7 && card->minor == 5 ? 1024 : 2048;
    case 40: return 3;
    case 75: return card->major;
    case 76: return card->minor;
    case 81: return card->shared_kib << 10; /* of a multiprocessor */
    case 97: return (card->shared_kib - 1) << 10;
    case 106: return 32;
    case 108: return (card->l2_mib << 20) / 4 * 3;
    case 111: return 1024;
    case 120: return card->major >= 9; /* clusters */
    /* overlap, host mapping, several kernels, ECC, unified addresses, priorities, L1 caches, managed memory and access to it,
       preemption, registered host pointers, cooperative launch, flushing of remote writes, host registration, pools and VMM */
    case 15: case 19: case 31: case 32: case 41: case 78: case 79: case 80: case 83: case 89: case 90: case 91: case 95:
    case 96: case 98: case 99: case 102: case 103: case 107: case 109: case 115: case 119: return 1;
    default: return 0;
  }
}
