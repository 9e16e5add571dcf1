/* forgeyard init: PID 1 of every job container. `init fifo`: commands and reports pass through FIFOs in /.forgeyard.
 * `init replay FILE`: runs the steps of FILE on its own stdio and exits as the first unmasked failure.
 *
 * It has the workload's uid. What it rests on: PID 1 gets no signal from inside its namespace that it doesn't handle,
 * SIGKILL included; a non-dumpable process can't be opened through /proc or traced by its own uid. The workload can
 * lower our rlimits (prlimit), so once started we need no new descriptor or mapping to go on. protocol.py describes
 * the frames and is the other end. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { VERSION = 2, MAX_FRAME = 4 << 20, MAX_WORDS = 1 << 16, MAX_STEPS = 1 + 64, EXIT_LOST = 70, EXIT_USAGE = 64 };
enum { SWEEPS = 400, SWEEP_MS = 5, REPORT_MS = 10000 };
enum { GO = 1, STEP, SIGNAL, KILL_STEP, FINISH };
enum { HELLO = 0x81, STARTED, NOEXEC, EXITED, BACKGROUND_EXITED, ERROR };
enum { STAGE_FORK = 1, STAGE_STDIN, STAGE_CHDIR, STAGE_EXEC, STAGE_INTERPRETER };
enum { BACKGROUND = 1, MERGE = 2, MASKED = 4, ON_FAILURE = 8, ALWAYS = 16, PROBE = 32 };

struct step { uint32_t id, flags; char *cwd, *input, **argv, **env; };
/* In a shared page, since that costs a child no descriptor to report in. Only our own non-dumpable code ever has it
 * mapped: exec drops it. child: ours, the step itself or its supervisor. pid: the step. */
struct slot { uint32_t id; pid_t child, pid; int stage, error, reported, masked; };

static unsigned char frame[MAX_FRAME] __attribute__((aligned(1 << 16)));   /* whole pages, so that it can be dropped */
static size_t have;                               /* bytes of the frame that have come */
static char *words[MAX_WORDS];
static volatile struct slot *slots;               /* 0: the foreground step; the others: background steps */
static struct end { int over, status; struct rusage used; } ended;   /* how the foreground step's process ended */
static int backgrounds, replaying, released, failed, leftovers;
static int control_fd = -1, report_fd = -1, signal_fd = -1, oom_fd = -1, children_fd = -1;
static int outputs[3] = { 1, 2, -1 };             /* of steps, and one pipe for all that probes write */
static char oom_own[16] = "0";

/* Wait for input on one of two descriptors and for room in a third (-1: none), and leave in `set` which have input.
 * Not by poll: it goes by RLIMIT_NOFILE, which the workload can set to 0. */
static int await(int first, int second, int writable, int milliseconds, fd_set *set) {
    struct timeval time = { milliseconds / 1000, milliseconds % 1000 * 1000 };
    fd_set room;
    FD_ZERO(set);
    FD_ZERO(&room);
    if (first >= 0) FD_SET(first, set);
    if (second >= 0) FD_SET(second, set);
    if (writable >= 0) FD_SET(writable, &room);
    return select(FD_SETSIZE, set, &room, NULL, milliseconds < 0 ? NULL : &time);
}

/* A report is one write of at most PIPE_BUF bytes, so that a supervisor's and ours never mix. */
static void report(unsigned char type, const void *payload, size_t size) {
    unsigned char out[256] = { (unsigned char)(size + 1), 0, 0, 0, type };   /* a little-endian length, below 256 */
    fd_set none;
    if (replaying && (type != ERROR || write(2, payload, size) == (ssize_t)size)) return;
    if (replaying || size > sizeof out - 6) _exit(EXIT_LOST);
    memcpy(out + 5, payload, size);
    while (write(report_fd, out, size + 5) < 0)   /* a reader that is gone, or stuck for long, has lost the job */
        if (errno != EAGAIN || await(-1, -1, report_fd, REPORT_MS, &none) <= 0)
            _exit(EXIT_LOST);
}
#define REPORT(type, ...) report(type, (const uint64_t[]){ __VA_ARGS__ }, sizeof((const uint64_t[]){ __VA_ARGS__ }))
#define COMPLAIN(text) report(ERROR, text "\n", sizeof text)

static void report_exit(unsigned char type, uint32_t id, int status, const struct rusage *used) {
    const struct timeval user = used->ru_utime, kernel = used->ru_stime;
    REPORT(type, id, (uint32_t)status, (uint32_t)leftovers, (uint64_t)user.tv_sec, (uint64_t)user.tv_usec,
           (uint64_t)kernel.tv_sec, (uint64_t)kernel.tv_usec, (uint64_t)used->ru_maxrss);
}

static void report_noexec(volatile struct slot *slot, int stage, int error) {
    slot->reported = 1;
    REPORT(NOEXEC, slot->id, (uint32_t)error, (uint32_t)stage);
    if (replaying) COMPLAIN("forgeyard: the program of a step can't be run");
}

static _Noreturn void give_up(volatile struct slot *slot, int stage) {
    slot->error = errno;
    slot->stage = stage;
    _exit(127);
}

/* Returns only when it failed: the stage, errno set. ENOENT for a file that is there means its interpreter. */
static int exec_file(const char *file, char **argv, char **env) {
    execve(file, argv, env);
    int error = errno, stage = error == ENOENT && access(file, F_OK) == 0 ? STAGE_INTERPRETER : STAGE_EXEC;
    errno = error;
    return stage;
}

/* As execvpe, but with the step's own PATH and without a shell for files that have no #! line. A directory that may
 * not be searched hides nothing behind it: EACCES is the answer only if no later directory has the program. */
static int exec_program(char **argv, char **env) {
    static char file[4096];
    size_t name = strlen(argv[0]);
    int denied = 0;
    const char *dir = "/usr/local/bin:/usr/bin:/bin", *next;
    if (name == 0 || strchr(argv[0], '/')) return exec_file(argv[0], argv, env);
    for (char **variable = env; *variable; variable++)
        if (strncmp(*variable, "PATH=", 5) == 0) dir = *variable + 5;
    for (; dir; dir = next) {
        size_t length = strcspn(dir, ":");
        next = dir[length] ? dir + length + 1 : NULL;
        if (length + name + 2 > sizeof file) continue;
        memcpy(file, dir, length);
        if (length)                               /* an empty entry is the working directory */
            file[length++] = '/';
        memcpy(file + length, argv[0], name + 1);
        int stage = exec_file(file, argv, env);
        denied |= errno == EACCES;
        if (stage != STAGE_EXEC || (errno != EACCES && errno != ENOENT && errno != ENOTDIR))
            return stage;
    }
    errno = denied ? EACCES : ENOENT;
    return STAGE_EXEC;
}

static _Noreturn void become(const struct step *step, volatile struct slot *slot) {
    sigset_t none;
    setsid();                                     /* a group of its own, so that a soft signal reaches all of it */
    int input = open(*step->input ? step->input : "/dev/null", O_RDONLY | O_CLOEXEC);
    if (input < 0 || dup2(input, 0) < 0 || dup2(outputs[step->flags & PROBE ? 2 : 0], 1) < 0 ||
        dup2(step->flags & (MERGE | PROBE) ? 1 : outputs[1], 2) < 0)
        give_up(slot, STAGE_STDIN);
    if (chdir(step->cwd) < 0) give_up(slot, STAGE_CHDIR);
    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_DFL);                  /* refused for KILL, STOP and libc's own, which need none */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    give_up(slot, exec_program(step->argv, step->env));
}

static int find_child(pid_t child) {
    int i = MAX_STEPS - 1;
    while (i > 0 && slots[i].child != child) i--;
    return i;
}

static void reap(int options) {
    struct rusage used;
    int status, i;
    for (pid_t child; (child = wait4(-1, &status, options, &used)) > 0;)
        if (child == slots[0].child) {
            slots[0].child = 0;                   /* from here on the number may be another's */
            ended = (struct end){ 1, status, used };
        } else if ((i = find_child(child)) > 0) {
            if (!slots[i].reported)               /* a supervisor that was killed; its orphans are ours now */
                report_exit(BACKGROUND_EXITED, slots[i].id, status, &used);
            slots[i].child = 0;
            backgrounds--;
        } else
            leftovers += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

/* Kill our children other than supervisors: how many there were, -1 if the kernel can't list them. Their children
 * become ours when they die, so that repeating it empties the tree and spares what is below a supervisor. */
static int kill_children(void) {
    static char list[4097];
    int alive = 0;
    ssize_t size = pread(children_fd, list, sizeof list - 1, 0);
    if (size < 0) return -1;
    list[size] = 0;
    for (char *at = list, *end; *at; at = end + 1) {
        pid_t child = (pid_t)strtol(at, &end, 10);
        if (*end != ' ' || child <= 1)            /* a number cut in two by the buffer's end: next time */
            return alive + 1;
        if (find_child(child) == 0 && ++alive) kill(child, SIGKILL);
    }
    return alive;
}

/* -1: not empty after many rounds. Two quiet ones in a row, as the kernel's list may miss a process once. */
static int sweep(void) {
    fd_set change;
    struct signalfd_siginfo info;
    for (int round = 0, quiet = 0, alive = 0; round < SWEEPS && alive >= 0; round++) {
        reap(WNOHANG);
        alive = kill_children();
        if ((quiet = alive ? 0 : quiet + 1) == 2) return 0;
        if (alive > 0 && await(signal_fd, -1, -1, SWEEP_MS, &change) > 0 && read(signal_fd, &info, sizeof info) < 0)
            break;
    }
    return -1;
}

/* The bytes of a step are all in its pipes once everything that could write them is dead: report only then. */
static void end_foreground(void) {
    int code = WIFEXITED(ended.status) ? WEXITSTATUS(ended.status) : 128 + WTERMSIG(ended.status);
    int stage = slots[0].stage, error = slots[0].error;
    ended.over = 0;
    leftovers = 0;
    int mixed = backgrounds && sweep() < 0;
    if (mixed) COMPLAIN("leftovers could not be told from background steps: all were killed");
    if (mixed || !backgrounds) {
        kill(-1, SIGKILL);                        /* one pass under the kernel's lock: no fork can slip past it */
        reap(0);
    }
    if (stage) {
        report_noexec(&slots[0], stage, error);
        code = stage == STAGE_EXEC && (error == ENOENT || error == ENOTDIR) ? 127 : 126;
    } else
        report_exit(EXITED, slots[0].id, ended.status, &ended.used);
    if (!failed && !slots[0].masked) failed = code;
}

/* A child starts with our score, raised for the fork: the kernel picks the workload before us. Where the runtime set
 * a floor this is refused, and it chooses by size alone, as it would without us. */
static int set_oom(const char *score) { return pwrite(oom_fd, score, strlen(score), 0) >= 0; }

static void wipe_frame(void) {
    madvise(frame, sizeof frame, MADV_DONTNEED);  /* a step's environment stays nowhere, and costs no memory */
    have = 0;
}

/* A background step's parent. Its descendants stay below it however they daemonise, so that a sweep can spare them. */
static _Noreturn void supervise(const struct step *step, volatile struct slot *slot) {
    struct rusage used;
    int status;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if ((slot->pid = vfork()) == 0)               /* its parent goes on once it has run exec, or has failed to */
        become(step, slot);
    if (slot->pid < 0 || slot->stage) {
        report_noexec(slot, slot->pid < 0 ? STAGE_FORK : slot->stage, slot->pid < 0 ? errno : slot->error);
        _exit(0);
    }
    REPORT(STARTED, slot->id, (uint32_t)slot->pid);
    wipe_frame();
    for (int output = 0; output < 3; output++) close(outputs[output]);
    for (pid_t pid; (pid = wait4(-1, &status, 0, &used)) > 0;)
        if (pid == slot->pid) {
            slot->reported = 1;
            report_exit(BACKGROUND_EXITED, slot->id, status, &used);
        }
    _exit(0);
}

static void start(const struct step *step) {
    int behind = step->flags & BACKGROUND, i = behind ? find_child(0) : 0;
    volatile struct slot *slot = &slots[i];
    for (int output = 0; output < 3; output++)    /* steps share these: one that made them non-blocking must not */
        fcntl(outputs[output], F_SETFL, 0);       /* break the next */
    memset((void *)slot, 0, sizeof *slot);
    slot->id = step->id;
    slot->masked = behind || step->flags & MASKED;
    if (atoi(oom_own) < 500) set_oom("500");
    errno = EAGAIN;
    pid_t child = behind && i == 0 ? -1 : fork();
    if (child == 0) i ? supervise(step, slot) : become(step, slot);
    int error = errno;
    set_oom(oom_own);
    slot->child = child > 0 ? child : 0;
    backgrounds += i > 0 && child > 0;
    if (child < 0) {
        report_noexec(slot, STAGE_FORK, error);
        failed = failed || slot->masked ? failed : 126;
    } else if (i == 0)
        REPORT(STARTED, slot->id, (uint32_t)(slot->pid = child));
}

/* id 0: the foreground step. One that has just ended is no error: its report is under way. */
static void signal_step(uint32_t id, int number) {
    for (int i = 0; i < MAX_STEPS; i++) {
        pid_t pid = i && slots[i].reported ? 0 : slots[i].pid;
        if (!slots[i].child || (id ? slots[i].id != id : i > 0)) continue;
        if (pid > 1 && kill(-pid, number) < 0)
            kill(pid, number);                    /* forked, but not yet leader of its group */
        if (i && number == SIGKILL)
            kill(slots[i].child, SIGKILL);        /* what else is below becomes a leftover */
    }
}

static _Noreturn void fail(void) {
    COMPLAIN("forgeyard: a command is damaged or out of turn");
    _exit(EXIT_LOST);                             /* the end of PID 1 is the end of all in its namespace */
}

static uint32_t number_at(size_t at) {
    uint32_t value;
    memcpy(&value, frame + at, sizeof value);
    return value;
}

/* 1: a whole frame is there; 0: not yet; -1: the end, or nonsense. */
static int fill_frame(void) {
    size_t want = 4 + (have < 4 ? 0 : (size_t)number_at(0));
    if (want > sizeof frame || want == have) return -1;
    ssize_t size = read(control_fd, frame + have, want - have);
    if (size <= 0) return size < 0 && errno == EAGAIN ? 0 : -1;
    have += (size_t)size;
    return have > 4 && have == 4 + (size_t)number_at(0);
}

static char *next_string(size_t *at) {
    unsigned char *start = frame + *at, *end = memchr(start, 0, have - *at);
    if (!end) fail();
    *at += (size_t)(end - start) + 1;
    return (char *)start;
}

/* id, flags, count of arguments, count of variables; then working directory, stdin, arguments, variables. */
static struct step parse_step(void) {
    size_t at = 21, count = 0;
    if (have < at || number_at(13) < 1 || (uint64_t)number_at(13) + number_at(17) + 2 > MAX_WORDS) fail();
    uint32_t argc = number_at(13), envc = number_at(17);
    struct step step = { number_at(5), number_at(9), next_string(&at), NULL, words, words + argc + 1 };
    step.input = next_string(&at);
    for (uint32_t i = 0; i < argc + envc + 1; i++)
        words[count++] = i == argc ? NULL : next_string(&at);
    words[count] = NULL;
    if (at != have) fail();
    return step;
}

static void obey(void) {
    int type = frame[4];
    if (type == STEP && released && !slots[0].child) {
        struct step step = parse_step();
        if (!replaying || step.flags & ALWAYS || !(step.flags & ON_FAILURE) == !failed)
            start(&step);
    } else if (type == GO && have == 5)
        released = 1;
    else if (type == FINISH && have == 5)
        _exit(0);
    else if (type == SIGNAL && have == 13)
        signal_step(number_at(5), (int)number_at(9));
    else if (type == KILL_STEP && have == 9)
        signal_step(number_at(5), SIGKILL);
    else
        fail();
    wipe_frame();
}

static void take_signal(void) {
    static const uint32_t soft = 1U << SIGTERM | 1U << SIGINT | 1U << SIGHUP | 1U << SIGQUIT | 1U << SIGUSR1 |
                                 1U << SIGUSR2 | 1U << SIGWINCH;
    struct signalfd_siginfo info;
    if (read(signal_fd, &info, sizeof info) != sizeof info) return;
    /* Only from outside (pid 0): the job has no business with us. */
    if (info.ssi_pid == 0 && info.ssi_signo < 32 && soft >> info.ssi_signo & 1)
        signal_step(0, (int)info.ssi_signo);
    reap(WNOHANG);
    if (ended.over) end_foreground();
}

static int open_or_leave(const char *name, int mode) {
    int fd = open(name, mode | O_NONBLOCK | O_CLOEXEC);   /* never waits; a FIFO nobody reads fails with ENXIO */
    if (fd < 0) _exit(EXIT_LOST);
    return fd;
}

static void harden(void) {
    sigset_t all;
    if (syscall(SYS_close_range, 3, ~0U, 0) < 0)  /* runtimes have leaked host descriptors */
        for (int fd = 3; fd < 4096; fd++)         /* kernels before 5.9 */
            close(fd);
    oom_fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);   /* not ours to open once non-dumpable */
    if (oom_fd >= 0 && read(oom_fd, oom_own, sizeof oom_own - 1) <= 0) oom_fd = -1;
    children_fd = open("/proc/self/task/1/children", O_RDONLY | O_CLOEXEC);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    signal_fd = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
    slots = mmap(NULL, sizeof *slots * MAX_STEPS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (prctl(PR_SET_DUMPABLE, 0) < 0 || signal_fd < 0 || slots == MAP_FAILED) _exit(EXIT_LOST);
    prctl(PR_SET_NAME, "forgeyard-init");
}

int main(int argc, char **argv) {
    int null = open("/dev/null", O_RDWR), whole;
    fd_set input;
    replaying = released = argc == 3 && strcmp(argv[1], "replay") == 0;
    if (getpid() != 1 || (!replaying && (argc != 2 || strcmp(argv[1], "fifo"))))
        _exit(EXIT_USAGE);                        /* kill(-1) is meant for a namespace that is ours alone */
    if (null < 0 || dup2(null, 0) < 0 || (!replaying && (dup2(null, 1) < 0 || dup2(null, 2) < 0)))
        _exit(EXIT_LOST);
    harden();
    control_fd = open_or_leave(replaying ? argv[2] : "/.forgeyard/control", O_RDONLY);
    if (!replaying) {
        report_fd = open_or_leave("/.forgeyard/report", O_WRONLY);
        outputs[0] = open_or_leave("/.forgeyard/stdout", O_WRONLY);
        outputs[1] = open_or_leave("/.forgeyard/stderr", O_WRONLY);
        outputs[2] = open("/.forgeyard/probe", O_WRONLY | O_NONBLOCK | O_CLOEXEC); /* services alone have it */
        REPORT(HELLO, VERSION, (uint32_t)getpid(), getuid(), getgid());
    }
    for (;;) {
        int busy = replaying && slots[0].child;   /* the next frame waits in its file until this step is over */
        if (await(signal_fd, busy ? -1 : control_fd, -1, -1, &input) < 0) _exit(EXIT_LOST);
        if (FD_ISSET(signal_fd, &input)) take_signal();
        if (FD_ISSET(control_fd, &input) && (whole = fill_frame()) != 0)
            /* the end: of the file; or of the executor, and so of all it started */
            whole < 0 ? _exit(replaying && have == 0 ? failed : EXIT_LOST) : obey();
    }
}
