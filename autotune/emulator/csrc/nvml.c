/* NVML: what the driver tells about all cards, whatever this process sees of them. */
#include "emu.h"

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NO_PERMISSION = 4, NVML_NOT_FOUND = 6, NVML_TOO_SMALL = 7,
       NVML_LOST = 15 };

static char handles[MAX_CARDS], of_sliced[MAX_CARDS]; /* of what CUDA can use; of GPUs that are cut into slices */

static int place(const void *handle) {
  long at = (const char *)handle - handles;
  return at >= 0 && at < machine.cards ? (int)at : -1;
}

static int sliced_gpu(const void *handle) {
  long gpu = (const char *)handle - of_sliced;
  return gpu >= 0 && gpu < machine.gpus ? (int)gpu : -1;
}

static const Card *card_of(const void *handle) {
  int at = place(handle), gpu = sliced_gpu(handle);
  return at >= 0 ? &machine.card[at] : gpu >= 0 ? &machine.gpu[gpu].whole : NULL;
}

static void *handle_of(int gpu) { return machine.gpu[gpu].slices ? &of_sliced[gpu] : &handles[machine.gpu[gpu].first]; }

static int64_t used_of(const void *handle) {
  if (place(handle) >= 0) return emu_used(place(handle));
  int gpu = sliced_gpu(handle);
  int64_t sum = 0;
  for (int i = 0; i < machine.gpu[gpu].slices; i++) sum += emu_used(machine.gpu[gpu].first + i);
  return sum;
}

/* What a question about this card meets first. */
static int barred(const void *handle) {
  const Card *card = card_of(handle);
  if (!card) return NVML_INVALID_ARGUMENT;
  if (card->state == CARD_LOST) return NVML_LOST;
  return card->state == CARD_FORBIDDEN ? NVML_NO_PERMISSION : SUCCESS;
}

#define ABOUT(handle)                     \
  int failed = barred(handle);            \
  const Card *card = card_of(handle);     \
  if (failed || !card) return failed;

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
  /* The first branch that had this CUDA: 525 for 12.0, 570 for 12.8, 580 for 13. */
  int version = machine.driver_version, branch = version >= 13000 ? 580 : version >= 12080 ? 570 : 525;
  snprintf(text, size, "%d.00", branch);
  return SUCCESS;
}

ENTRY int nvmlSystemGetNVMLVersion(char *text, unsigned size) {
  return nvmlSystemGetDriverVersion(text, size);
}

ENTRY int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = machine.driver_version; return SUCCESS; }
ALIAS(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2)

ENTRY int nvmlDeviceGetCount_v2(unsigned *count) { *count = machine.gpus; return SUCCESS; }
ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

ENTRY int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if ((int)index >= machine.gpus) return NVML_INVALID_ARGUMENT;
  *handle = handle_of(index);
  return card_of(*handle)->state == CARD_FORBIDDEN ? NVML_NO_PERMISSION : SUCCESS;
}
ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)

ENTRY int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  for (int i = 0; i < machine.cards; i++)
    if (!strcmp(machine.card[i].uuid, uuid)) {
      *handle = &handles[i];
      return SUCCESS;
    }
  for (int i = 0; i < machine.gpus; i++)
    if (!strcmp(card_of(handle_of(i))->uuid, uuid)) {
      *handle = handle_of(i);
      return SUCCESS;
    }
  return NVML_NOT_FOUND;
}

ENTRY int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
  unsigned domain = 0, bus = 0;
  sscanf(text, "%x:%x", &domain, &bus);
  for (int i = 0; i < machine.gpus; i++)
    if (emu_attribute(card_of(handle_of(i)), 33) == (int)bus) {
      *handle = handle_of(i);
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

/* The older form counts as used what the driver keeps for itself. */
struct memory { uint64_t total, free, used; };
struct memory_v2 { unsigned version; uint64_t total, reserved, free, used; };

ENTRY int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
  ABOUT(handle)
  if (card->state == CARD_MEMORYLESS) return NVML_NOT_SUPPORTED;
  uint64_t used = used_of(handle) + card->reserved, total = card->memory + card->reserved;
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

struct process { unsigned pid; uint64_t used; };
struct process_v2 { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; };

static int list(void *handle, unsigned *count, void *out, size_t step) {
  if (place(handle) < 0) return NVML_NOT_SUPPORTED; /* processes are listed by slice */
  int pids[MAX_PROCESSES];
  int64_t used[MAX_PROCESSES];
  unsigned there = machine.hides_processes ? 0 : emu_processes(place(handle), pids, used, MAX_PROCESSES);
  unsigned room = *count;
  *count = there;
  if (room < there || (!out && there)) return NVML_TOO_SMALL;
  for (unsigned i = 0; i < there; i++) {
    struct process_v2 entry = {pids[i] + machine.pid_shift, used[i], ~0u, ~0u};
    memcpy((char *)out + i * step, &entry, step);
  }
  return SUCCESS;
}

ENTRY int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *out) {
  ABOUT(handle)
  return list(handle, count, out, sizeof(struct process_v2));
}
ALIAS(nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3)

ENTRY int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out) {
  ABOUT(handle)
  return list(handle, count, out, sizeof(struct process));
}

/* Busy is a card that serves one process at a time, and serves another. */
ENTRY int nvmlDeviceGetComputeMode(void *handle, int *mode) {
  ABOUT(handle)
  *mode = card->state == CARD_BUSY ? 3 : 0;
  return SUCCESS;
}

ENTRY int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) { ABOUT(handle) *degrees = 30; return SUCCESS; }
ENTRY int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { ABOUT(handle) *milliwatts = 60000; return SUCCESS; }

ENTRY int nvmlDeviceGetUtilizationRates(void *handle, unsigned rates[2]) {
  ABOUT(handle)
  rates[0] = rates[1] = 0;
  return SUCCESS;
}

/* A legacy bus id, domain, bus, device, ids, and the bus id once more. */
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

ENTRY int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
  ABOUT(handle)
  memset(pci, 0, sizeof *pci);
  pci->bus = emu_attribute(card, 33);
  snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
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

ENTRY int nvmlDeviceGetTopologyCommonAncestor(void *handle, void *other, int *level) {
  ABOUT(handle)
  *level = 30; /* one processor socket */
  return SUCCESS;
}

ENTRY int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
  ABOUT(handle)
  if (card->slice >= 0) return NVML_INVALID_ARGUMENT;
  *current = *pending = sliced_gpu(handle) >= 0;
  return SUCCESS;
}

enum { MOST_SLICES = 7 };

ENTRY int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
  ABOUT(handle)
  *count = sliced_gpu(handle) >= 0 ? MOST_SLICES : 0;
  return SUCCESS;
}

ENTRY int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
  ABOUT(handle)
  int gpu = sliced_gpu(handle);
  if (gpu < 0) return NVML_NOT_SUPPORTED;
  if ((int)index >= machine.gpu[gpu].slices) return NVML_NOT_FOUND;
  *slice = &handles[machine.gpu[gpu].first + index];
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
  *handle = handle_of(card->gpu);
  return SUCCESS;
}

/* No fabric between machines. */
struct fabric { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; };
struct fabric_v { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned health; };

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
