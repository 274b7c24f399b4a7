#!/bin/bash
# Real S3 server (Ceph RADOS Gateway on a one-node RADOS cluster) on 127.0.0.1, for CI.
#
#   start_s3.sh start STATE_DIR [PORT]   install if missing, start, wait until usable, print settings
#   start_s3.sh stop STATE_DIR           stop what the pid files in STATE_DIR name
#   start_s3.sh status STATE_DIR         exit 0 when all three daemons run
#
# Debian packages are unpacked into a private folder (S3_PREFIX) with their own libc and ld.so;
# dpkg, /usr, /etc and every Python stay untouched and no root is needed. Needs: bash, apt-get,
# dpkg-deb, tar, flock, timeout (all in a plain Debian image); openssl for S3_TLS=1 only.
# "start" again restarts only the daemons that died (e.g. after kill -9 of the gateway); a mem
# store whose storage daemon died, or that was stopped, starts empty.
# Environment (those marked * apply when STATE_DIR is first made):
#   S3_SUITE   forky (default, Ceph 20) | trixie (18) | bookworm (16): older ones lack checksums
#   S3_PREFIX  unpacked packages; cache this folder in CI (default ~/.cache/ci-s3)
#   S3_MIRROR  Debian mirror (default: the one that apt on this machine uses)
#   S3_STORE * disk (default: sparse BlueStore file in STATE_DIR, survives stop and kill -9) | mem (RAM, lost on stop)
#   S3_TLS   * 1: https with a self-signed certificate, STATE_DIR/ca.pem
#   S3_ACCESS_KEY, S3_SECRET_KEY *   (default: random)
#   S3_LC_DAY_SECONDS *  a lifecycle "day" lasts this many seconds (rgw_lc_debug_interval)
#   S3_SIZE_GB *  capacity, 8 by default, used only as data arrives
set -Eeuo pipefail
trap 'echo "start_s3: line $LINENO failed: $BASH_COMMAND" >&2' ERR
umask 022
say() { echo "start_s3: $*" >&2; }
die() { say "$*"; exit 1; }
[ $# -ge 2 ] || { sed -n '2,/^set -e/{/^#/p}' "$0" >&2; exit 2; }
CMD=$1; mkdir -p "$2"; S=$(cd "$2" && pwd); PORT=${3:-}
apt_mirror() { # the Debian mirror that apt on this machine uses
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true; } |
    sed -nE 's#^URIs: *([^ ]+/debian)/? *$#\1#p; s#^deb +(\[[^]]*\] +)?([^ ]+/debian)/? .*#\2#p' | sed -n 1p
}
SUITE=${S3_SUITE:-forky}; MIRROR=${S3_MIRROR:-$(apt_mirror)}
ARCH=$(dpkg --print-architecture); BASE=${S3_PREFIX:-${HOME:-/tmp}/.cache/ci-s3}; R=$BASE/$SUITE-$ARCH
DAEMONS="client.rgw osd.0 mon.a"
[[ $S =~ [[:space:]\$] ]] && die "no blanks or \$ in STATE_DIR"

pid_of() { # prints the pid when that daemon of this STATE_DIR runs (guards against pid reuse)
  local p; p=$(cat "$S/run/$1.pid" 2>/dev/null) || return 1
  [ -n "$p" ] && tr '\0' '\n' <"/proc/$p/cmdline" 2>/dev/null | grep -qxF "$S/ceph.conf" && echo "$p"
}
stop_all() {
  local d p i
  for d in $DAEMONS; do
    p=$(pid_of "$d") || { rm -f "$S/run/$d.pid"; continue; }
    kill "$p" 2>/dev/null || true
    for i in $(seq 200); do pid_of "$d" >/dev/null || break; sleep 0.05; done
    if p=$(pid_of "$d"); then say "$d did not stop, SIGKILL"; kill -9 "$p" || true; sleep 0.2; fi
    rm -f "$S/run/$d.pid"
  done
}
apt_() { APT_CONFIG=$W/apt.conf apt-get -qq -o Acquire::Retries=3 "$@"; }
ldso() { find "$1"/usr/lib64 "$1"/lib64 "$1"/usr/lib "$1"/lib -maxdepth 2 -name 'ld-linux*.so.*' -print -quit 2>/dev/null || true; }
libs() { # library path of the unpacked tree; plugins and cls are found through ceph.conf
  local d o=""
  for d in "$1"/usr/lib/*-linux-gnu* "$1"/lib/*-linux-gnu* "$1"/usr/lib/*-linux-gnu*/ceph; do [ -d "$d" ] && o=$o:$d; done
  echo "${o#:}"
}
X() { local b=$1; shift; "$LD" --library-path "$LP" "$R/usr/bin/$b" "$@"; }

install_prefix() {
  [ -e "$R/.complete" ] && return 0
  mkdir -p "$BASE"; exec 9>"$BASE/.lock"; flock 9
  [ -e "$R/.complete" ] && { exec 9>&-; return 0; }
  W=$(mktemp -d "$BASE/tmp.XXXXXX"); trap 'rm -rf "$W"' EXIT
  mkdir -p "$W"/{state/lists/partial,cache/archives/partial,debs}; : >"$W/status"
  local key=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [signed-by=$key] $MIRROR $SUITE main" >"$W/sources.list"
  printf '%s\n' "Dir::Etc::sourcelist \"$W/sources.list\";" 'Dir::Etc::sourceparts "/dev/null";' \
    'Dir::Etc::preferencesparts "/dev/null";' "Dir::State \"$W/state\";" "Dir::State::status \"$W/status\";" \
    "Dir::Cache \"$W/cache\";" "APT::Sandbox::User \"\";" 'APT::Default-Release "";' 'Acquire::Languages "none";' >"$W/apt.conf"
  say "fetching Ceph from Debian $SUITE into $R"
  apt_ update >&2 || die "apt-get update failed"
  local all pk keep try f miss
  all=$(apt_ -s --no-install-recommends install radosgw ceph-mon ceph-osd ceph-base ceph-common | awk '/^Inst/{print $2}' | sort -u) \
    || die "Debian $SUITE cannot resolve radosgw now; try S3_SUITE=trixie or a dated S3_MIRROR"
  for try in small full; do # small: shared libraries and daemons only; full: the whole dependency list
    rm -rf "$W/root"; mkdir "$W/root"
    if [ $try = small ]; then
      keep=$(grep -E '^(lib|ceph-(mon|osd|base|common)$|radosgw$|zlib)' <<<"$all" |
        grep -vE '^lib(python|perl|pam|systemd-shared|binutils|glib2|gprofng|ctf|sframe|dw1|elf|rgw2|cephfs|rbd|radosstriper|lvm2|parted|ncurses|readline|db5|sem|ext2fs|nvme)') || true
    else keep=$all; fi
    (cd "$W/debs" && apt_ download $keep >&2) || die "download failed"
    for pk in $keep; do
      f=$(find "$W/debs" -name "${pk}_*.deb" -print -quit)
      dpkg-deb --fsys-tarfile "$f" | tar -x -C "$W/root" --exclude='./usr/share' --exclude='./etc' --exclude='./var' \
        --exclude='*/ceph-dencoder' --exclude='*/cephfs-*' --exclude='*/ceph-kvstore-tool' --exclude='*/ceph-objectstore-tool' \
        --exclude='*/ceph-monstore-tool' --exclude='*/radosgw-object-expirer' --exclude='*/ceph-bluestore-tool'
    done
    LD=$(ldso "$W/root"); LP=$(libs "$W/root"); miss=""
    for f in "$W"/root/usr/bin/{radosgw,radosgw-admin,ceph-mon,ceph-osd,monmaptool,osdmaptool} "$W"/root/usr/lib/*/rados-classes/*.so "$W"/root/usr/lib/*/ceph/erasure-code/libec_jerasure.so; do
      miss=$miss$("$LD" --library-path "$LP" --list "$f" 2>&1 | grep -E 'not found|cannot open' || true)
    done
    [ -z "$miss" ] && break
    say "missing with the $try set: $miss"
  done
  say "downloaded $(du -sm "$W/debs" | cut -f1) MB"
  [ -z "$miss" ] || die "cannot complete the library set"
  (cd "$W/debs" && sha256sum ./*.deb) >"$W/root/MANIFEST.sha256"
  R=$W/root; X radosgw --version >"$W/root/VERSION" || die "radosgw does not run"
  R=$BASE/$SUITE-$ARCH; rm -rf "$R"; touch "$W/root/.complete"; mv "$W/root" "$R"
  rm -rf "$W"; trap - EXIT; exec 9>&-
}

open_port() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
free_port() { local p; while :; do p=$((RANDOM % 12000 + 20000)); open_port $p || { echo $p; return; }; done; }
rnd() { od -An -tx1 -N"$1" /dev/urandom | tr -d ' \n'; }
uuid() { cat /proc/sys/kernel/random/uuid; }

make_state() {
  [ -e "$S/.s3-state" ] || [ -z "$(ls -A "$S")" ] || die "$S is neither empty nor mine"
  touch "$S/.s3-state"; rm -rf "$S"/{mon,osd,rgw,run,log}; mkdir -p "$S"/{mon,osd,rgw,run,log}
  STORE=${S3_STORE:-disk}; local size=$((${S3_SIZE_GB:-8} << 30)) L be mp
  L=$(dirname "$(find "$R/usr/lib" -maxdepth 3 -type d -name rados-classes -print -quit)")
  case $STORE in mem) be=memstore ;; disk) be=bluestore ;; *) die "S3_STORE must be mem or disk" ;; esac
  PORT=${PORT:-$(free_port)}; open_port "$PORT" && die "port $PORT is taken"
  mp=$(free_port); FSID=$(uuid); SCHEME=http; local fe="endpoint=127.0.0.1:$PORT"
  if [ "${S3_TLS:-0}" = 1 ]; then
    SCHEME=https; fe="ssl_endpoint=127.0.0.1:$PORT ssl_certificate=$S/ca.pem ssl_private_key=$S/tls.key"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=localhost \
      -addext 'subjectAltName=IP:127.0.0.1,DNS:localhost' -keyout "$S/tls.key" -out "$S/ca.pem" 2>"$S/log/openssl.log" || die "openssl failed"
  fi
  AK=${S3_ACCESS_KEY:-AK$(rnd 9)}; SK=${S3_SECRET_KEY:-$(rnd 20)}
  : >"$S/keyring"
  # cephx is off: every daemon listens on loopback only and S3 requests are still checked with
  # SigV4. radosgw insists on encrypted monitor links unless ms_mon_client_mode says crc.
  cat >"$S/ceph.conf" <<E
[global]
fsid = $FSID
mon host = [v2:127.0.0.1:$mp]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
ms bind ipv6 = false
ms mon client mode = crc
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
paxos propose interval = 0.05
paxos min wait = 0.01
mon data avail warn = 2
mon data avail crit = 1
plugin dir = $L/ceph
erasure code dir = $L/ceph/erasure-code
osd class dir = $L/rados-classes
run dir = $S/run
admin socket = $S/run/\$name.asok
pid file = $S/run/\$name.pid
log file = $S/log/\$name.log
mon cluster log file = $S/log/cluster.log
log to stderr = false
err to stderr = false
crash dir = $S/log
keyring = $S/keyring
[mon]
mon data = $S/mon
[osd]
osd data = $S/osd
osd objectstore = $be
osd op queue = wpq
osd op num shards = 2
memstore device bytes = $size
memstore page size = 65536
bluestore block size = $size
osd memory target = 939524096
[client]
rgw data = $S/rgw
rgw frontends = beast $fe
rgw thread pool size = 64
rgw exit timeout secs = 1
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw gc processor max time = 5
rgw lc debug interval = ${S3_LC_DAY_SECONDS:--1}
E
  X monmaptool --create --clobber --fsid "$FSID" --addv a "[v2:127.0.0.1:$mp]" "$S/monmap" >"$S/log/mkfs.log" 2>&1
  X osdmaptool -c "$S/ceph.conf" --createsimple 1 --clobber "$S/osdmap" >>"$S/log/mkfs.log" 2>&1
  X ceph-mon -c "$S/ceph.conf" -i a --mkfs --monmap "$S/monmap" --osdmap "$S/osdmap" >>"$S/log/mkfs.log" 2>&1
  timeout 120 "$LD" --library-path "$LP" "$R/usr/bin/ceph-osd" -c "$S/ceph.conf" --no-mon-config -i 0 --mkfs --osd-uuid "$(uuid)" >>"$S/log/mkfs.log" 2>&1
  (umask 077; : >"$S/env")
  cat >"$S/env" <<E
S3_ENDPOINT=$SCHEME://127.0.0.1:$PORT
S3_CA=$([ $SCHEME = https ] && echo "$S/ca.pem" || true)
S3_STORE=$STORE
AWS_ACCESS_KEY_ID=$AK
AWS_SECRET_ACCESS_KEY=$SK
AWS_DEFAULT_REGION=us-east-1
E
}

fail() { say "$1; last log lines:"; for f in "$S"/log/*.log; do tail -n 4 "$f"; done >&2 || true; stop_all; exit 1; }
start_all() {
  ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)" || true
  LD=$(ldso "$R"); LP=$(libs "$R"); local fresh=0 i
  # a mem store is lost with its storage daemon: begin again from nothing
  if [ -e "$S/env" ] && grep -qx S3_STORE=mem "$S/env" && ! pid_of osd.0 >/dev/null; then
    [ -n "$PORT" ] || PORT=$(sed -n 's/^S3_ENDPOINT=.*://p' "$S/env")
    stop_all; rm -f "$S/env"
  fi
  [ -e "$S/env" ] || { stop_all; make_state; fresh=1; }
  grep -qF "plugin dir = $R/" "$S/ceph.conf" || die "$S was made with another S3_SUITE or S3_PREFIX"
  local EP; EP=$(sed -n 's/^S3_ENDPOINT=//p' "$S/env")
  [ -z "$PORT" ] || [ "$PORT" = "${EP##*:}" ] || die "$S was made for ${EP}; stop it and use a new STATE_DIR for another port"
  PORT=${EP##*:}
  pid_of mon.a >/dev/null || timeout 60 "$LD" --library-path "$LP" "$R/usr/bin/ceph-mon" -c "$S/ceph.conf" -i a >>"$S/log/start.log" 2>&1 </dev/null || fail "ceph-mon"
  pid_of osd.0 >/dev/null || timeout 60 "$LD" --library-path "$LP" "$R/usr/bin/ceph-osd" -c "$S/ceph.conf" -i 0 >>"$S/log/start.log" 2>&1 </dev/null || fail "ceph-osd"
  if [ $fresh = 1 ]; then # this also proves that placement groups accept writes
    timeout 60 "$LD" --library-path "$LP" "$R/usr/bin/radosgw-admin" -c "$S/ceph.conf" user create --uid=ci --display-name=ci \
      --access-key="$AK" --secret-key="$SK" >"$S/log/user.json" 2>>"$S/log/start.log" </dev/null || { rm -f "$S/env"; fail "user create"; }
  fi
  pid_of client.rgw >/dev/null || timeout 60 "$LD" --library-path "$LP" "$R/usr/bin/radosgw" -c "$S/ceph.conf" -n client.rgw >>"$S/log/start.log" 2>&1 </dev/null || fail "radosgw"
  for i in $(seq 600); do
    open_port "$PORT" && break
    # on a busy machine the pid file of a fresh gateway may come late
    [ "$i" -lt 100 ] || pid_of client.rgw >/dev/null || fail "radosgw died"
    [ "$i" = 600 ] && fail "radosgw does not listen on $PORT"; sleep 0.05
  done
}

case $CMD in
  start) T0=$(date +%s%N); install_prefix; T1=$(date +%s%N); start_all
    say "$(cut -d' ' -f1-3 "$R/VERSION"), install $(((T1 - T0) / 1000000)) ms, start $((($(date +%s%N) - T1) / 1000000)) ms"
    cat "$S/env" ;;
  stop) stop_all ;;
  status) for d in $DAEMONS; do pid_of "$d" >/dev/null || { echo "$d down"; exit 1; }; done; echo up ;;
  *) die "unknown command $CMD" ;;
esac
