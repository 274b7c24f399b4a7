#!/usr/bin/env bash
# What docker/Dockerfile does for the CPU image, without an engine: installs the lock into a folder that serves as
# root, in the same order, or runs a command there as user 1000 with a read-only tree. As root, in namespaces of its
# own: `unshare --mount --pid --fork --kill-child empty_root.sh ROOT PREFIX install REPOSITORY`
# `... empty_root.sh ROOT PREFIX run SHM_BYTES COMMAND...`. PREFIX: of the Python to use, found at the same place.
set -Eeuo pipefail
root=$1 prefix=$2 what=$3
shift 3

mount --make-rprivate /
mkdir -p "$root"
mount --bind "$root" "$root"
mkdir -p "$root"/{proc,dev,tmp,etc/picotron,home/picotron,opt/picotron,srv,root} "$root$prefix"
for name in usr bin sbin lib lib32 lib64; do # the C library and what it needs, as the base image has them
  if [ -L "/$name" ]; then
    [ -e "$root/$name" ] || cp --no-dereference "/$name" "$root/$name"
  elif [ -d "/$name" ]; then
    mkdir -p "$root/$name"
    mount --bind --options ro "/$name" "$root/$name"
  fi
done
mount --bind "$prefix" "$root$prefix"
mount -o remount,bind,ro "$root$prefix"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir -p "$root/dev/shm"

case $what in
  install)
    repository=$1
    for name in ssl ca-certificates resolv.conf hosts nsswitch.conf ld.so.cache pip.conf xdg; do
      if [ -e "/etc/$name" ]; then cp --recursive --dereference "/etc/$name" "$root/etc/" || true; fi
    done
    printf 'root:x:0:0::/root:/bin/sh\npicotron:x:1000:1000::/home/picotron:/bin/sh\n' >"$root/etc/passwd"
    printf 'root:x:0:\npicotron:x:1000:\n' >"$root/etc/group"
    if [ -d /opt ]; then mount --bind --options ro /opt "$root/opt"; fi # an index that pip's settings may name
    mount --bind --options ro "$repository" "$root/srv"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    inside() { chroot "$root" env HOME=/root TMPDIR=/tmp "$@"; }
    pip=(-m pip install --no-cache-dir --quiet --disable-pip-version-check)
    # Stage wheel. The tree is copied: the build writes into it.
    inside "$prefix/bin/python3" -m venv /tmp/build
    inside /tmp/build/bin/python "${pip[@]}" --require-hashes --requirement /srv/docker/lock/build.txt
    mkdir -p "$root/tmp/src"
    cp --recursive "$repository"/{LICENSE,README.md,pyproject.toml,picotron_ray,tuning} "$root/tmp/src/"
    inside /tmp/build/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /tmp/wheels /tmp/src
    # Stages base and cpu.
    inside "$prefix/bin/python3" -m venv /venv
    inside /venv/bin/python "${pip[@]}" --no-deps --require-hashes --requirement /srv/docker/lock/cpu.txt
    inside /venv/bin/python "${pip[@]}" --no-deps --require-hashes --requirement /srv/docker/lock/common.txt
    inside sh -c '/venv/bin/python -m pip install --quiet --no-cache-dir --no-deps /tmp/wheels/*.whl'
    inside /venv/bin/python -m pip check
    ;;
  run)
    shm=$1
    shift
    mount -o remount,bind,ro "$root"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mount -t tmpfs -o uid=1000,gid=1000,mode=700 tmpfs "$root/home/picotron"
    mount -t tmpfs -o "mode=1777,size=$shm" tmpfs "$root/dev/shm"
    exec chroot --userspec=1000:1000 "$root" env --ignore-environment --chdir=/home/picotron \
      PATH=/venv/bin:/usr/bin:/bin HOME=/home/picotron PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 "$@"
    ;;
esac
