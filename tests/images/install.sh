#!/bin/sh
# Installs Debian packages on top of a tree, as a Dockerfile's RUN does. Runs as root in a mount namespace of its own.
#
#   install.sh LOWER UPPER WORK ROOT FILES BEFORE AFTER PACKAGES [APT-OPTIONS...]
#
# LOWER stays as it is; what changed lies in UPPER afterwards, as overlayfs writes it. FILES is copied to the root.
# BEFORE and AFTER are shell commands that run inside, before and after the installation.
set -eu
lower=$1 upper=$2 work=$3 root=$4 files=$5 before=$6 after=$7 packages=$8
shift 8

# Whole files and nothing but whiteouts in UPPER: no renames or metadata that only this overlay would understand.
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper,workdir=$work,redirect_dir=off,metacopy=off,index=off" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"

# For the installation only: names are resolved as here, and no package starts a daemon.
cp /etc/resolv.conf "$root/etc/resolv.conf"
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod 0755 "$root/usr/sbin/policy-rc.d"

export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin
chroot "$root" sh -ec "$before"
chroot "$root" apt-get -q update
# The word splitting is meant.
# shellcheck disable=SC2086
chroot "$root" apt-get -q -y --no-install-recommends --reinstall "$@" \
    -o APT::Keep-Downloaded-Packages=false -o DPkg::Options::=--force-unsafe-io -o DPkg::Options::=--force-confold \
    install $packages
cp -R --no-preserve=ownership "$files/." "$root/"
chroot "$root" sh -ec "$after"

rm -rf "$root/usr/sbin/policy-rc.d" "$root/etc/resolv.conf" "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin \
    "$root/var/cache/ldconfig/aux-cache" "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old \
    "$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow-
find "$root/var/log" -type f -exec rm {} +
