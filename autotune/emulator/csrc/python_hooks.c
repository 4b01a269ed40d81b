/* Entry points that the Python code in inject/ calls, beside those of memory.c and
 * runtime_launch.c: phases of a step, and torch's own peaks. */
#include "emu.h"

/* From here on, memory is a phase's of this name; what is held already counts for it. */
ENTRY void emu_phase(const char *name) {
  if (emu_begin_phase(name)) emu_note_held();
}

/* torch's own peaks on one of this process's devices. */
ENTRY void emu_note_torch(int ordinal, int64_t allocated, int64_t reserved) {
  if (ordinal < 0 || ordinal >= machine.visible) return;
  int physical = machine.physical[ordinal];
  int64_t *peak_allocated = &emu_report->torch_allocated[physical];
  int64_t *peak_reserved = &emu_report->torch_reserved[physical];
  if (allocated > *peak_allocated) *peak_allocated = allocated;
  if (reserved > *peak_reserved) *peak_reserved = reserved;
}

/* This process's peak on a card. */
ENTRY int64_t emu_peak(int physical) { return emu_report->peak[physical]; }
