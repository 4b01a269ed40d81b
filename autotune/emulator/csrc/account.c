/* Who holds how much of which card. Processes that name the same state file share the cards, and a dead process's memory comes
 * back, as the driver gives it back. */
#include "emu.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

typedef struct { int32_t pid, has_context, has_launched, unused; int64_t used; } Holder;
typedef struct { int64_t used; Holder holder[MAX_PROCESSES]; } Account;
typedef struct { uint32_t magic, unused; pthread_mutex_t lock; Account card[MAX_CARDS]; } Shared;
enum { MAGIC = 0x454d5531 };
static Shared *shared;

/* Robust: a process that is killed inside the lock does not leave the others waiting. */
static void begin(Shared *fresh) {
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&fresh->lock, &kind);
  for (int i = 0; i < machine.cards; i++) fresh->card[i].used = machine.card[i].foreign;
  fresh->magic = MAGIC;
}

__attribute__((constructor(103))) static void open_state(void) {
  if (!machine.cards) return;
  const char *path = getenv("AUTOTUNE_EMULATED_STATE");
  int fd = path && *path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (fd >= 0) {
    flock(fd, LOCK_EX);
    if (ftruncate(fd, sizeof(Shared))) { close(fd); fd = -1; }
  }
  shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
  if (shared->magic != MAGIC) begin(shared);
  if (fd >= 0) { flock(fd, LOCK_UN); close(fd); }
}

static void lock(void) {
  if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}

static void unlock(void) { pthread_mutex_unlock(&shared->lock); }

static void clear(Account *card, Holder *gone) {
  card->used -= gone->used;
  memset(gone, 0, sizeof *gone);
}

/* Whether a process has ended; one that nobody has waited for yet is still listed. */
int emu_is_gone(int pid) {
  char path[32], state = 'Z';
  if (kill(pid, 0) && errno == ESRCH) return 1;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *file = fopen(path, "re");
  if (!file) return kill(pid, 0) && errno == ESRCH;
  /* The name, in brackets, may hold anything but is short: the state stands behind the last bracket. */
  char text[512];
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  char *bracket = strrchr(text, ')');
  if (bracket) sscanf(bracket + 1, " %c", &state);
  return state == 'Z' || state == 'X';
}

static void bury_the_dead(Account *card) {
  for (Holder *each = card->holder; each < card->holder + MAX_PROCESSES; each++)
    if (each->pid && each->pid != getpid() && emu_is_gone(each->pid)) clear(card, each);
}

static Holder *mine(Account *card) {
  Holder *vacant = NULL;
  for (Holder *each = card->holder; each < card->holder + MAX_PROCESSES; each++) {
    if (each->pid == getpid()) return each;
    if (!each->pid && !vacant) vacant = each;
  }
  if (vacant) vacant->pid = getpid();
  return vacant;
}

/* A card's peak, which is always reached by somebody who takes. */
static void note_card(int physical) {
  Account *card = &shared->card[physical];
  int64_t *peak = &emu_report->card_peak[physical];
  if (card->used > *peak) bury_the_dead(card);
  if (card->used > *peak) *peak = card->used;
}

/* With the lock held. */
static int take(int physical, int64_t bytes) {
  Account *card = &shared->card[physical];
  if (bytes > 0 && card->used + bytes > machine.card[physical].memory) bury_the_dead(card);
  if (bytes > 0 && card->used + bytes > machine.card[physical].memory) {
    emu_report->refused++;
    return OUT_OF_MEMORY;
  }
  Holder *holder = mine(card);
  card->used += bytes;
  if (holder) holder->used += bytes;
  emu_note_use(physical, holder ? holder->used : 0);
  if (bytes > 0) note_card(physical);
  return SUCCESS;
}

int emu_charge(int ordinal, int64_t bytes) {
  lock();
  int result = take(machine.physical[ordinal], bytes);
  unlock();
  return result;
}

int emu_enter(int ordinal) {
  static __thread int entered_by[MAX_CARDS];
  int failed = emu_initialise();
  if (failed) return failed;
  if (ordinal < 0 || ordinal >= machine.visible) return INVALID_DEVICE;
  if (entered_by[ordinal] == getpid()) return SUCCESS;
  const Card *card = emu_card(ordinal);
  if (card->state == CARD_BUSY || card->state == CARD_LOST) return DEVICES_UNAVAILABLE;
  lock();
  Holder *holder = mine(&shared->card[machine.physical[ordinal]]);
  if (holder && !holder->has_context) {
    failed = take(machine.physical[ordinal], card->context);
    holder->has_context = !failed;
  }
  unlock();
  if (!failed) entered_by[ordinal] = getpid();
  return failed;
}

int emu_has_context(int ordinal) {
  if (!emu_is_initialised()) return 0;
  lock();
  Holder *holder = mine(&shared->card[machine.physical[ordinal]]);
  int has = holder && holder->has_context;
  unlock();
  return has;
}

/* Kernels are loaded into the context as they are first used; here all at once, since which are used is not followed. */
void emu_first_launch(int ordinal) {
  static __thread int launched_by[MAX_CARDS];
  emu_report->launches++;
  if (launched_by[ordinal] == getpid() || emu_enter(ordinal)) return;
  launched_by[ordinal] = getpid();
  lock();
  Holder *holder = mine(&shared->card[machine.physical[ordinal]]);
  if (holder && !holder->has_launched && !take(machine.physical[ordinal], emu_card(ordinal)->kernels)) holder->has_launched = 1;
  unlock();
}

int64_t emu_used(int physical) {
  lock();
  bury_the_dead(&shared->card[physical]);
  int64_t used = shared->card[physical].used;
  unlock();
  return used;
}

int emu_processes(int physical, int pids[], int64_t used[], int room) {
  int count = 0;
  lock();
  Account *card = &shared->card[physical];
  bury_the_dead(card);
  for (Holder *each = card->holder; each < card->holder + MAX_PROCESSES; each++) {
    if (!each->pid || !each->used) continue;
    if (count < room) { pids[count] = each->pid; used[count] = each->used; }
    count++;
  }
  unlock();
  return count;
}

/* For tests: processes outside the emulation come to hold so much of a card. Refused where it is not free. */
ENTRY int emu_set_foreign(int physical, int64_t bytes) {
  static int64_t held[MAX_CARDS];
  if (physical < 0 || physical >= machine.cards) return INVALID_DEVICE;
  lock();
  Account *card = &shared->card[physical];
  int fits = card->used - held[physical] + bytes <= machine.card[physical].memory;
  if (fits) {
    card->used += bytes - held[physical];
    held[physical] = bytes;
  }
  unlock();
  return fits ? SUCCESS : OUT_OF_MEMORY;
}

__attribute__((destructor)) static void give_back(void) {
  if (!shared) return;
  lock();
  for (int i = 0; i < machine.cards; i++)
    for (int k = 0; k < MAX_PROCESSES; k++)
      if (shared->card[i].holder[k].pid == getpid()) clear(&shared->card[i], &shared->card[i].holder[k]);
  unlock();
}
