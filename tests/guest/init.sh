#!/bin/sh
# PID 1 of the guest, run by busybox. First from the initrd, then again, with "second", from the root it has put
# together. Everything the host wants to know goes through named virtio ports; the console is for a kernel's last words.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

# Ports and disks are found by name: their order is nobody's promise.
port() {
    for entry in /sys/class/virtio-ports/*; do
        if [ "$(cat "$entry/name")" = "$1" ]; then
            echo "/dev/${entry##*/}"
            return
        fi
    done
    echo "guest: no port $1" >/dev/console
    return 1
}

disk() {
    for entry in /sys/block/vd*; do
        if [ "$(cat "$entry/serial")" = "$1" ]; then
            echo "/dev/${entry##*/}"
            return
        fi
    done
    echo "guest: no disk $1" >/dev/console
    return 1
}

# A job on the host rootfs reads all of /usr once. Emulated, over virtiofs, that takes a minute on a machine with much
# in it, and no test of control groups needs it: cover what the programs of the tests do not use.
lighten() {
    for directory in /newroot/usr/include /newroot/usr/share /newroot/usr/src /newroot/usr/lib/*; do
        case $directory in
            */lib/*-linux-gnu | */lib/python* | */lib/locale) continue ;;
        esac
        if [ -d "$directory" ] && [ ! -L "$directory" ]; then
            mount -t tmpfs -o ro tmpfs "$directory"
        fi
    done
}

first_stage() {
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t devtmpfs devtmpfs /dev
    while read -r module; do
        insmod "/modules/$module"
    done </modules/order
    # The host's tree, which nobody here can write, under a layer of memory that takes what is written.
    mount -t virtiofs -o ro host /lower
    mount -t tmpfs -o size=300m,mode=755 tmpfs /upper
    mkdir /upper/upper /upper/work
    mount -t overlay -o lowerdir=/lower,upperdir=/upper/upper,workdir=/upper/work overlay /newroot
    lighten
    for name in proc sys dev; do
        mount --move "/$name" "/newroot/$name"
    done
    mount -t tmpfs -o mode=755 tmpfs /newroot/run
    cp /init /command /newroot/run/
    exec switch_root /newroot /bin/busybox sh /run/init second
}

second_stage() {
    mkdir -p /dev/pts /dev/shm
    mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mount -t tmpfs -o mode=1777 tmpfs /tmp
    # On a disk, since what is mounted for a job is ID-mapped, which Linux 6.1 does for ext4 and not for tmpfs.
    mount -t ext4 -o noatime "$(disk state)" /var/tmp
    chmod 1777 /var/tmp
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    ip link set lo up 2>/dev/null || ifconfig lo up
    status=0
    sh /run/command </dev/null >"$(port stdout)" 2>"$(port stderr)" || status=$?
    echo "$status" >"$(port status)"
    reboot -f
}

case ${1:-first} in
    second) second_stage ;;
    *) first_stage ;;
esac
