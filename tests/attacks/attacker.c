/* What a hostile job tries, one attack per argument: `attacker call:mount read:/etc/shadow …`. Each runs in a process
 * of its own and is answered in one line: the argument, then "done N" (it worked), "errno N", or "signal N". Every
 * attack is chosen so that it does no harm where it works: a mount of nothing, a clock set by nothing. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define CALL(...) syscall(__VA_ARGS__)
static const char *extra = "";   /* what stands behind a call's name: call:connect=127.0.0.1:80 */

static long in_int80(void) {
#if defined(__x86_64__)
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20L) : "memory");
    return result;
#else
    return raise(SIGSYS);
#endif
}

static long process_vm(int number) {
    char byte = 0;
    struct iovec local = { &byte, 1 }, remote = { (void *)0x400000, 1 };
    return CALL(number, 1, &local, 1L, &remote, 1L, 0L);
}

static long capset_all(void) {
    struct { uint32_t version; int pid; } header = { 0x20080522, 0 };
    struct { uint32_t effective, permitted, inheritable; } data[2] = { { ~0U, ~0U, 0 }, { ~0U, ~0U, 0 } };
    return CALL(SYS_capset, &header, data);
}

static long clock_set_to_itself(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return CALL(SYS_clock_settime, CLOCK_REALTIME, &now);
}

static long time_of_day_to_itself(void) {
    struct timeval now;
    gettimeofday(&now, NULL);
    return CALL(SYS_settimeofday, &now, NULL);
}

static long adjust_nothing(int number) {
    struct timex none = { .modes = 0 };
    return number == SYS_adjtimex ? CALL(number, &none) : CALL(number, CLOCK_REALTIME, &none);
}

static long add_address(void) {
    struct { struct nlmsghdr head; struct ifaddrmsg body; struct rtattr attribute; uint32_t value; } request = {
        { sizeof request, RTM_NEWADDR, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE, 1, 0 },
        { AF_INET, 32, 0, 0, 1 }, { 8, IFA_LOCAL }, htonl(0xC0000263) };
    struct { struct nlmsghdr head; struct nlmsgerr error; char rest[256]; } answer;
    int fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
    if (fd < 0 || send(fd, &request, sizeof request, 0) < 0 || recv(fd, &answer, sizeof answer, 0) < 0) return -1;
    errno = -answer.error.error;
    return errno ? -1 : 0;
}

/* AUDIT_GET: only asks. */
static long audit_status(void) {
    struct nlmsghdr request = { sizeof request, 1000, NLM_F_REQUEST | NLM_F_ACK, 1, 0 };
    int fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_AUDIT);
    struct { struct nlmsghdr head; struct nlmsgerr error; char rest[256]; } answer;
    if (fd < 0 || send(fd, &request, sizeof request, 0) < 0 || recv(fd, &answer, sizeof answer, 0) < 0) return -1;
    errno = -answer.error.error;
    return errno ? -1 : 0;
}

static long connect_tcp(void) {
    char host[64];
    struct sockaddr_in to = { .sin_family = AF_INET };
    const char *colon = strrchr(extra, ':');
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    snprintf(host, sizeof host, "%.*s", (int)(colon - extra), extra);
    to.sin_port = htons((uint16_t)atoi(colon + 1));
    inet_pton(AF_INET, host, &to.sin_addr);
    return fd < 0 ? -1 : connect(fd, (struct sockaddr *)&to, sizeof to);
}

static long connect_unix(int abstract) {
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    size_t length = strlen(extra);
    memcpy(to.sun_path + abstract, extra, length);
    return fd < 0 ? -1 : connect(fd, (struct sockaddr *)&to, (socklen_t)(2 + abstract + length));
}

static long capability_in_file(void) {
    static const uint32_t all[] = { 0x02000001, ~0U, 0, ~0U, 0 };
    int fd = open("/tmp/with-capabilities", O_CREAT | O_RDWR, 0755);
    return fd < 0 ? -1 : fsetxattr(fd, "security.capability", all, sizeof all, 0);
}

static long device(mode_t kind, unsigned major, unsigned minor) {
    unlink("/tmp/device");
    return mknod("/tmp/device", kind | 0666, makedev(major, minor));
}

static long disk(void) {
    unsigned major = 0, minor = 0;
    sscanf(extra, "%u,%u", &major, &minor);
    return device(S_IFBLK, major, minor);
}

static long open_handle(void) {
    struct { unsigned bytes; int type; unsigned char handle[8]; } root = { 8, 1, { 2 } };   /* inode 2: ext4's root */
    return CALL(SYS_open_by_handle_at, AT_FDCWD, &root, O_RDONLY);
}

/* What an image's file would have to let through to be changed for everybody; `extra` is its path. */
static long immutable_flag(void) {
    int fd = open(extra, O_RDONLY | O_NONBLOCK);
    int flags = 0x10 | 0x20;   /* FS_IMMUTABLE_FL, FS_APPEND_FL */
    return fd < 0 ? -1 : ioctl(fd, _IOW('f', 2, long), &flags);
}

static long handle_of_file(void) {
    struct { unsigned bytes; int type; unsigned char handle[128]; } file = { 128, 0, { 0 } };
    int mount = 0;
    if (CALL(SYS_name_to_handle_at, AT_FDCWD, extra, &file, &mount, 0) < 0) return -1;
    return CALL(SYS_open_by_handle_at, AT_FDCWD, &file, O_RDWR);
}

static long mapping_made_writable(void) {
    int fd = open(extra, O_RDONLY);
    char *memory = fd < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? -1 : mprotect(memory, 4096, PROT_READ | PROT_WRITE);
}

static long set_rlimit_beyond(void) {
    struct rlimit most = { RLIM_INFINITY, RLIM_INFINITY };
    return setrlimit(RLIMIT_NOFILE, &most);
}

static long real_time(void) {
    struct sched_param one = { .sched_priority = 1 };
    return sched_setscheduler(0, SCHED_FIFO, &one);
}

static long pidfd_steal(void) {
    long fd = CALL(434, 1, 0);
    return fd < 0 ? -1 : CALL(438, fd, 3, 0);
}

static long setns_of(const char *path) {
    int fd = open(path, O_RDONLY);
    return fd < 0 ? -1 : CALL(SYS_setns, fd, 0);
}

/* struct clone_args of clone3(2): flags first, exit_signal fifth. */
static long clone3_user(void) {
    uint64_t args[11] = { CLONE_NEWUSER, 0, 0, 0, SIGCHLD };
    long pid = CALL(435, args, sizeof args);
    if (pid == 0) _exit(0);
    return pid;
}

static long clone_with(unsigned long flags) {
    long pid = CALL(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) _exit(0);
    return pid;
}

static long filter_off(void) { return prctl(PR_SET_SECCOMP, 0, 0, 0, 0); }
static long privileges_on(void) { return prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0); }

static long weaken_init(void) {
    struct rlimit none = { 0, 0 };
    return prlimit(1, RLIMIT_NOFILE, &none, NULL);
}

/* The exhausting ones are bounded: they end by themselves where no limit stops them, and "done" is then a failure. */
enum { MANY = 4096, MUCH = 64 << 20, PIECE = 1 << 20 };

static long fork_bomb(void) {
    for (int i = 0; i < MANY; i++) {
        pid_t child = fork();
        if (child < 0) return -1;
        if (child == 0) { alarm(20); pause(); _exit(0); }
    }
    return MANY;
}

static long eat_memory(void) {
    for (int i = 0; i < MUCH / PIECE; i++) memset(malloc(PIECE), i + 1, PIECE);
    return MUCH;
}

static long fill(int fd) {
    static char piece[PIECE];
    if (fd < 0) return -1;
    memset(piece, 'x', PIECE);
    for (int i = 0; i < MUCH / PIECE; i++)
        if (write(fd, piece, PIECE) < 0) return -1;
    return MUCH;
}

static long fill_file(void) { return fill(open(extra, O_CREAT | O_WRONLY, 0644)); }

static long eat_inodes(void) {
    char name[4096];
    for (int i = 0; i < 100000; i++) {
        snprintf(name, sizeof name, "%s/i%d", extra, i);
        if (close(open(name, O_CREAT | O_WRONLY, 0644)) < 0) { errno = ENOSPC; return -1; }
    }
    return 100000;
}

static long eat_descriptors(void) {
    for (int i = 0; i < MANY * 4; i++)
        if (open("/dev/null", O_RDONLY) < 0) return -1;
    return MANY * 4;
}

/* What host root could make no more of, would a job's be charged to it. */
static long eat_inotify(void) {
    int most = 0;
    while (most < MANY && inotify_init() >= 0) most++;
    return most;
}

/* Says how many it has, and keeps them until it is killed. */
static long hold_inotify(void) {
    printf("%ld\n", eat_inotify());
    fflush(stdout);
    alarm(30);
    return pause();
}

static long eat_timers(void) {
    struct sigevent quiet = { .sigev_notify = SIGEV_NONE };
    timer_t timer;
    int most = 0;
    while (most < MANY * 64 && timer_create(CLOCK_MONOTONIC, &quiet, &timer) == 0) most++;
    return most;
}

#define ATTACKS(X) \
    X(weaken_init, weaken_init()) \
    X(fork_bomb, fork_bomb()) \
    X(eat_memory, eat_memory()) \
    X(fill, fill_file()) \
    X(fill_memfd, fill(memfd_create("x", 0))) \
    X(eat_inodes, eat_inodes()) \
    X(eat_descriptors, eat_descriptors()) \
    X(eat_inotify, eat_inotify()) \
    X(hold_inotify, hold_inotify()) \
    X(eat_timers, eat_timers()) \
    X(mount_proc, mount("proc", "/tmp", "proc", 0, NULL)) \
    X(mount_tmpfs, mount("none", "/tmp", "tmpfs", 0, NULL)) \
    X(mount_cgroup, mount("cgroup", "/tmp", "cgroup", 0, "memory")) \
    X(mount_bind, mount("/", "/tmp", NULL, MS_BIND, NULL)) \
    X(remount_rw, mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND, NULL)) \
    X(remount_proc_sys_rw, mount(NULL, "/proc/sys", NULL, MS_REMOUNT | MS_BIND, NULL)) \
    X(mount_shared, mount(NULL, "/", NULL, MS_SHARED | MS_REC, NULL)) \
    X(umount_proc, umount2("/proc/sys", MNT_DETACH)) \
    X(umount_mask, umount2("/proc/kcore", MNT_DETACH)) \
    X(pivot_root, CALL(SYS_pivot_root, "/", "/tmp")) \
    X(chroot, chroot("/tmp")) \
    X(open_tree, CALL(428, AT_FDCWD, "/", 1)) \
    X(move_mount, CALL(429, AT_FDCWD, "/proc", AT_FDCWD, "/tmp", 0)) \
    X(fsopen, CALL(430, "tmpfs", 0)) \
    X(fsmount, CALL(432, 0, 0, 0)) \
    X(fspick, CALL(433, AT_FDCWD, "/", 0)) \
    X(mount_setattr, CALL(442, AT_FDCWD, "/", 0, "", 32)) \
    X(mknod_disk, disk()) \
    X(mknod_mem, device(S_IFCHR, 1, 1)) \
    X(mknod_kmsg, device(S_IFCHR, 1, 11)) \
    X(mknod_fuse, device(S_IFCHR, 10, 229)) \
    X(ptrace_attach, ptrace(PTRACE_ATTACH, 1, 0, 0)) \
    X(ptrace_seize, ptrace(PTRACE_SEIZE, 1, 0, 0)) \
    X(process_vm_writev, process_vm(SYS_process_vm_writev)) \
    X(process_vm_readv, process_vm(SYS_process_vm_readv)) \
    X(pidfd_getfd, pidfd_steal()) \
    X(kcmp, CALL(SYS_kcmp, 1, getpid(), 0, 0, 0)) \
    X(add_key, CALL(SYS_add_key, "user", "forgeyard-attack", "x", 1, -4)) \
    X(keyctl, CALL(SYS_keyctl, 0, -4, 1)) \
    X(request_key, CALL(SYS_request_key, "user", "x", NULL, 0)) \
    X(bpf, CALL(SYS_bpf, 0, NULL, 0)) \
    X(perf_event_open, CALL(SYS_perf_event_open, NULL, 0, -1, -1, 0)) \
    X(userfaultfd, CALL(SYS_userfaultfd, 1)) \
    X(io_uring_setup, CALL(425, 8, NULL)) \
    X(io_uring_enter, CALL(426, 0, 0, 0, 0, NULL, 0)) \
    X(unshare_user, CALL(SYS_unshare, CLONE_NEWUSER)) \
    X(unshare_mount, CALL(SYS_unshare, CLONE_NEWNS)) \
    X(unshare_net, CALL(SYS_unshare, CLONE_NEWNET)) \
    X(unshare_pid, CALL(SYS_unshare, CLONE_NEWPID)) \
    X(clone_user, clone_with(CLONE_NEWUSER)) \
    X(clone_mount, clone_with(CLONE_NEWNS)) \
    X(clone_net, clone_with(CLONE_NEWNET)) \
    X(clone3_user, clone3_user()) \
    X(setns_own, setns_of("/proc/self/ns/mnt")) \
    X(setns_init, setns_of("/proc/1/ns/mnt")) \
    X(init_module, CALL(SYS_init_module, "", 0, "")) \
    X(finit_module, CALL(SYS_finit_module, 0, "", 0)) \
    X(delete_module, CALL(SYS_delete_module, "forgeyard_none", 0)) \
    X(kexec_load, CALL(SYS_kexec_load, 0, 0, NULL, 0)) \
    X(reboot, CALL(SYS_reboot, 0xfee1dead, 672274793, 0, NULL)) \
    X(swapon, CALL(SYS_swapon, "/tmp/none", 0)) \
    X(swapoff, CALL(SYS_swapoff, "/tmp/none")) \
    X(clock_settime, clock_set_to_itself()) \
    X(settimeofday, time_of_day_to_itself()) \
    X(adjtimex, adjust_nothing(SYS_adjtimex)) \
    X(clock_adjtime, adjust_nothing(SYS_clock_adjtime)) \
    X(sethostname, CALL(SYS_sethostname, "attacked", 8)) \
    X(setdomainname, CALL(SYS_setdomainname, "attacked", 8)) \
    X(acct, CALL(SYS_acct, "/tmp/none")) \
    X(quotactl, CALL(SYS_quotactl, 0, NULL, 0, NULL)) \
    X(kernel_log, CALL(SYS_syslog, 3, NULL, 0)) \
    X(fanotify_init, CALL(SYS_fanotify_init, 0, 0)) \
    X(open_by_handle, open_handle()) \
    X(vhangup, CALL(SYS_vhangup)) \
    X(set_mempolicy, CALL(SYS_set_mempolicy, 0, NULL, 0)) \
    X(move_pages, CALL(SYS_move_pages, 1, 0, NULL, NULL, NULL, 0)) \
    X(personality, CALL(SYS_personality, 0x0400000)) \
    X(modify_ldt, CALL(SYS_modify_ldt_or_none, 0, NULL, 0)) \
    X(undefined_call, CALL(999)) \
    X(foreign_abi, in_int80()) \
    X(capset, capset_all()) \
    X(capability_bound, prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, 21, 0, 0)) \
    X(setuid, CALL(SYS_setuid, 0)) \
    X(setgid, CALL(SYS_setgid, 0)) \
    X(setgroups, CALL(SYS_setgroups, 0, NULL)) \
    X(file_capability, capability_in_file()) \
    X(trusted_attribute, setxattr("/tmp", "trusted.overlay.opaque", "y", 1, 0)) \
    X(immutable_flag, immutable_flag()) \
    X(handle_of_file, handle_of_file()) \
    X(mapping_made_writable, mapping_made_writable()) \
    X(trusted_redirect, setxattr(extra, "trusted.overlay.redirect", "/", 1, 0)) \
    X(user_redirect, setxattr(extra, "user.overlay.redirect", "/", 1, 0)) \
    X(privileges_on, privileges_on()) \
    X(filter_off, filter_off()) \
    X(rlimit_beyond, set_rlimit_beyond()) \
    X(real_time, real_time()) \
    X(nice, setpriority(PRIO_PROCESS, 0, -20)) \
    X(raw_socket, socket(AF_INET, SOCK_RAW, IPPROTO_ICMP)) \
    X(packet_socket, socket(AF_PACKET, SOCK_RAW, 0)) \
    X(vsock, socket(40, SOCK_STREAM, 0)) \
    X(alg_socket, socket(38, SOCK_SEQPACKET, 0)) \
    X(key_socket, socket(15, SOCK_RAW, 2)) \
    X(bluetooth, socket(31, SOCK_RAW, 0)) \
    X(audit, audit_status()) \
    X(add_address, add_address()) \
    X(connect, connect_tcp()) \
    X(abstract_socket, connect_unix(1)) \
    X(unix_socket, connect_unix(0)) \
    X(shared_memory, shmget((key_t)atoi(extra), 1, 0))

#ifdef SYS_modify_ldt
#define SYS_modify_ldt_or_none SYS_modify_ldt
#else
#define SYS_modify_ldt_or_none 999
#endif

static long call(const char *name) {
    char bare[64];
    const char *equals = strchr(name, '=');
    if (equals) extra = equals + 1;
    snprintf(bare, sizeof bare, "%.*s", equals ? (int)(equals - name) : 60, name);
#define X(attack, expression) if (strcmp(bare, #attack) == 0) return (long)(expression);
    ATTACKS(X)
    _exit(64);
}

static long read_file(const char *path) {
    char bytes[256];
    int fd = open(path, O_RDONLY | O_NONBLOCK);
    return fd < 0 ? -1 : read(fd, bytes, sizeof bytes);
}

static long list(const char *path) {
    long entries = -2;   /* . and .. */
    DIR *directory = opendir(path);
    if (!directory) return -1;
    while (readdir(directory)) entries++;
    return entries;
}

static long follow(const char *path) {
    char target[256];
    return readlink(path, target, sizeof target);
}

/* write: only opened; put: a byte is written as well, where the path is a canary of the test's own. */
static long write_file(const char *path, int put) {
    int fd = open(path, O_WRONLY | O_NONBLOCK);
    return fd < 0 || !put ? fd : write(fd, "1", 1);
}

/* echo:TEXT>PATH */
static long echo(const char *text) {
    const char *path = strchr(text, '>');
    int fd = open(path + 1, O_WRONLY | O_NONBLOCK);
    return fd < 0 ? -1 : write(fd, text, (size_t)(path - text));
}

static long attempt(const char *argument) {
    const char *what = strchr(argument, ':') + 1;
    if (strncmp(argument, "call:", 5) == 0) return call(what);
    if (strncmp(argument, "read:", 5) == 0) return read_file(what);
    if (strncmp(argument, "list:", 5) == 0) return list(what);
    if (strncmp(argument, "link:", 5) == 0) return follow(what);
    if (strncmp(argument, "write:", 6) == 0) return write_file(what, 0);
    if (strncmp(argument, "put:", 4) == 0) return write_file(what, 1);
    if (strncmp(argument, "echo:", 5) == 0) return echo(what);
    if (strncmp(argument, "mkdir:", 6) == 0) return mkdir(what, 0755);
    if (strncmp(argument, "create:", 7) == 0) return open(what, O_CREAT | O_EXCL | O_WRONLY, 0644);
    if (strncmp(argument, "unlink:", 7) == 0) return unlink(what);
    _exit(64);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int status;
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            long result = attempt(argv[i]);
            int error = errno;
            if (result < 0) printf("%s\terrno %d\n", argv[i], error);
            else printf("%s\tdone %ld\n", argv[i], result);
            fflush(stdout);
            _exit(0);
        }
        if (child < 0 || waitpid(child, &status, 0) < 0) return 70;
        if (WIFSIGNALED(status)) printf("%s\tsignal %d\n", argv[i], WTERMSIG(status));
        else if (WEXITSTATUS(status)) return WEXITSTATUS(status);
    }
    return 0;
}
