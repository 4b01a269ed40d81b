/* NVML: what the driver reports about all cards, whatever this process sees of them. */
#include "emu.h"

enum {
  NVML_INVALID_ARGUMENT = 2,
  NVML_NOT_SUPPORTED = 3,
  NVML_NO_PERMISSION = 4,
  NVML_NOT_FOUND = 6,
  NVML_TOO_SMALL = 7,
  NVML_LOST = 15,
};

/* 1. Handles: the address of one of these bytes. The first are of what CUDA can use, the others of
 * GPUs that are cut into slices. */

static char card_handles[MAX_CARDS], sliced_gpu_handles[MAX_CARDS];

/* The number of the card; -1 for another handle. */
static int card_index(const void *handle) {
  long index = (const char *)handle - card_handles;
  return index >= 0 && index < machine.cards ? (int)index : -1;
}

/* The number of the GPU; -1 for another handle. */
static int sliced_gpu_index(const void *handle) {
  long index = (const char *)handle - sliced_gpu_handles;
  return index >= 0 && index < machine.gpus ? (int)index : -1;
}

static const Card *card_of(const void *handle) {
  int card = card_index(handle), gpu = sliced_gpu_index(handle);
  if (card >= 0) return &machine.card[card];
  return gpu >= 0 ? &machine.gpu[gpu].whole : NULL;
}

static void *handle_of_gpu(int gpu) {
  if (machine.gpu[gpu].slices) return &sliced_gpu_handles[gpu];
  return &card_handles[machine.gpu[gpu].first];
}

static int64_t used_of(const void *handle) {
  int card = card_index(handle);
  if (card >= 0) return emu_used(card);
  const Gpu *gpu = &machine.gpu[sliced_gpu_index(handle)];
  int64_t used = 0;
  for (int i = 0; i < gpu->slices; i++) used += emu_used(gpu->first + i);
  return used;
}

/* The error of every query about this card. */
static int access_error(const void *handle) {
  const Card *card = card_of(handle);
  if (!card) return NVML_INVALID_ARGUMENT;
  if (card->state == CARD_LOST) return NVML_LOST;
  return card->state == CARD_FORBIDDEN ? NVML_NO_PERMISSION : SUCCESS;
}

/* Begins a query: declares `card`, or returns the error. */
#define ABOUT(handle)                   \
  int error = access_error(handle);     \
  const Card *card = card_of(handle);   \
  if (error || !card) return error;

/* 2. The library and the driver. */

ENTRY int nvmlInit_v2(void) { return SUCCESS; }
ALIAS(nvmlInit, nvmlInit_v2)
ENTRY int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
ENTRY int nvmlShutdown(void) { return SUCCESS; }

ENTRY const char *nvmlErrorString(int error) {
  switch (error) {
    case SUCCESS: return "Success";
    case NVML_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_NOT_SUPPORTED: return "Not Supported";
    case NVML_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_NOT_FOUND: return "Not Found";
    case NVML_TOO_SMALL: return "Insufficient Size";
    case NVML_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}

ENTRY int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  /* The first branch that had this CUDA. */
  int branch = 525;                                   /* 12.0 */
  if (machine.driver_version >= 12080) branch = 570;
  if (machine.driver_version >= 13000) branch = 580;
  snprintf(text, size, "%d.00", branch);
  return SUCCESS;
}

ENTRY int nvmlSystemGetNVMLVersion(char *text, unsigned size) {
  return nvmlSystemGetDriverVersion(text, size);
}

ENTRY int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = machine.driver_version;
  return SUCCESS;
}
ALIAS(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2)

/* 3. Handles of GPUs. */

ENTRY int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = machine.gpus;
  return SUCCESS;
}
ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

ENTRY int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if ((int)index >= machine.gpus) return NVML_INVALID_ARGUMENT;
  *handle = handle_of_gpu(index);
  return card_of(*handle)->state == CARD_FORBIDDEN ? NVML_NO_PERMISSION : SUCCESS;
}
ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)

ENTRY int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  for (int i = 0; i < machine.cards; i++)
    if (!strcmp(machine.card[i].uuid, uuid)) {
      *handle = &card_handles[i];
      return SUCCESS;
    }
  for (int i = 0; i < machine.gpus; i++)
    if (!strcmp(card_of(handle_of_gpu(i))->uuid, uuid)) {
      *handle = handle_of_gpu(i);
      return SUCCESS;
    }
  return NVML_NOT_FOUND;
}

ENTRY int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
  unsigned domain = 0, bus = 0;
  sscanf(text, "%x:%x", &domain, &bus);
  for (int i = 0; i < machine.gpus; i++)
    if (emu_attribute(card_of(handle_of_gpu(i)), PCI_BUS_ID) == (int)bus) {
      *handle = handle_of_gpu(i);
      return SUCCESS;
    }
  return NVML_NOT_FOUND;
}
ALIAS(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2)

ENTRY int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  ABOUT(handle)
  *index = card->slice < 0 ? card->gpu : card->slice;
  return SUCCESS;
}
ALIAS(nvmlDeviceGetMinorNumber, nvmlDeviceGetIndex)

/* 4. Properties. */

ENTRY int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  ABOUT(handle)
  snprintf(text, size, "%s", card->name);
  return SUCCESS;
}

ENTRY int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  ABOUT(handle)
  snprintf(text, size, "%s", card->uuid);
  return SUCCESS;
}

ENTRY int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  ABOUT(handle)
  *major = card->major;
  *minor = card->minor;
  return SUCCESS;
}

/* 5. Memory and processes. The older form counts as used what the driver keeps for itself. */

struct memory {
  uint64_t total, free, used;
};
struct memory_v2 {
  unsigned version;
  uint64_t total, reserved, free, used;
};

ENTRY int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
  ABOUT(handle)
  if (card->state == CARD_MEMORYLESS) return NVML_NOT_SUPPORTED;
  uint64_t used = used_of(handle) + card->reserved;
  uint64_t total = card->memory + card->reserved;
  *memory = (struct memory){total, total - used, used};
  return SUCCESS;
}

ENTRY int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
  ABOUT(handle)
  if (card->state == CARD_MEMORYLESS) return NVML_NOT_SUPPORTED;
  memory->total = card->memory + card->reserved;
  memory->reserved = card->reserved;
  memory->used = used_of(handle);
  memory->free = card->memory - memory->used;
  return SUCCESS;
}

struct process {
  unsigned pid;
  uint64_t used;
};
struct process_v2 {
  unsigned pid;
  uint64_t used;
  unsigned gpu_instance, compute_instance;
};

/* Writes an entry of `size` bytes for each process; `count` is the capacity, then the number. */
static int list_processes(void *handle, unsigned *count, void *out, size_t size) {
  int card = card_index(handle);
  if (card < 0) return NVML_NOT_SUPPORTED; /* processes are listed by slice */
  int pids[MAX_PROCESSES];
  int64_t used[MAX_PROCESSES];
  unsigned number = 0, capacity = *count;
  if (!machine.hides_processes) number = emu_processes(card, pids, used, MAX_PROCESSES);
  *count = number;
  if (capacity < number || (!out && number)) return NVML_TOO_SMALL;
  for (unsigned i = 0; i < number; i++) {
    struct process_v2 entry = {pids[i] + machine.pid_shift, used[i], ~0u, ~0u};
    memcpy((char *)out + i * size, &entry, size);
  }
  return SUCCESS;
}

ENTRY int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *out) {
  ABOUT(handle)
  return list_processes(handle, count, out, sizeof(struct process_v2));
}
ALIAS(nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3)

ENTRY int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out) {
  ABOUT(handle)
  return list_processes(handle, count, out, sizeof(struct process));
}

/* 6. State. */

enum { MODE_DEFAULT = 0, MODE_EXCLUSIVE_PROCESS = 3 };

/* Busy is a card that serves one process at a time, and serves another. */
ENTRY int nvmlDeviceGetComputeMode(void *handle, int *mode) {
  ABOUT(handle)
  *mode = card->state == CARD_BUSY ? MODE_EXCLUSIVE_PROCESS : MODE_DEFAULT;
  return SUCCESS;
}

ENTRY int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) {
  ABOUT(handle)
  *degrees = 30;
  return SUCCESS;
}

ENTRY int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
  ABOUT(handle)
  *milliwatts = 60000;
  return SUCCESS;
}

ENTRY int nvmlDeviceGetUtilizationRates(void *handle, unsigned rates[2]) {
  ABOUT(handle)
  rates[0] = rates[1] = 0;
  return SUCCESS;
}

/* 7. Links between cards. */

struct pci {
  char legacy_bus_id[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};

ENTRY int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
  ABOUT(handle)
  memset(pci, 0, sizeof *pci);
  pci->bus = emu_attribute(card, PCI_BUS_ID);
  snprintf(pci->legacy_bus_id, sizeof pci->legacy_bus_id, "0000:%02X:00.0", pci->bus);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
  return SUCCESS;
}
ALIAS(nvmlDeviceGetPciInfo_v2, nvmlDeviceGetPciInfo_v3)
ALIAS(nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v3)

enum { P2P_BY_NVLINK = 3, P2P_OK = 0, P2P_NOT_SUPPORTED = 5 };

ENTRY int nvmlDeviceGetP2PStatus(void *handle, void *other, int kind, int *status) {
  ABOUT(handle)
  *status = kind == P2P_BY_NVLINK && !card->nvlink ? P2P_NOT_SUPPORTED : P2P_OK;
  return SUCCESS;
}

ENTRY int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
  ABOUT(handle)
  if (!card->nvlink) return NVML_NOT_SUPPORTED;
  *active = 1;
  return SUCCESS;
}

enum { LEVEL_SOCKET = 30 };

ENTRY int nvmlDeviceGetTopologyCommonAncestor(void *handle, void *other, int *level) {
  ABOUT(handle)
  *level = LEVEL_SOCKET;
  return SUCCESS;
}

/* 8. Slices. */

ENTRY int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
  ABOUT(handle)
  if (card->slice >= 0) return NVML_INVALID_ARGUMENT;
  *current = *pending = sliced_gpu_index(handle) >= 0;
  return SUCCESS;
}

enum { MOST_SLICES = 7 };

ENTRY int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
  ABOUT(handle)
  *count = sliced_gpu_index(handle) >= 0 ? MOST_SLICES : 0;
  return SUCCESS;
}

ENTRY int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
  ABOUT(handle)
  int gpu = sliced_gpu_index(handle);
  if (gpu < 0) return NVML_NOT_SUPPORTED;
  if ((int)index >= machine.gpu[gpu].slices) return NVML_NOT_FOUND;
  *slice = &card_handles[machine.gpu[gpu].first + index];
  return SUCCESS;
}

ENTRY int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is_slice) {
  ABOUT(handle)
  *is_slice = card->slice >= 0;
  return SUCCESS;
}

ENTRY int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *slice, void **handle) {
  ABOUT(slice)
  if (card->slice < 0) return NVML_INVALID_ARGUMENT;
  *handle = handle_of_gpu(card->gpu);
  return SUCCESS;
}

/* 9. The fabric between machines: there is none. */

struct fabric {
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
};
struct fabric_v {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};

ENTRY int nvmlDeviceGetGpuFabricInfo(void *handle, struct fabric *info) {
  ABOUT(handle)
  *info = (struct fabric){.state = 0};
  return SUCCESS;
}

ENTRY int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric_v *info) {
  ABOUT(handle)
  *info = (struct fabric_v){.version = info->version};
  return SUCCESS;
}
