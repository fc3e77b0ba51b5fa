#!/bin/bash
# The first and only program in a virtual machine started by `cargo xtask kernels`: relays on each data path, then runs
# the tests. Lines that begin with @@ are parsed by xtask/src/kernels/report.rs.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin HOME=/root

mkdir -p /proc /sys /dev /run /tmp /root /var/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
for dir in /dev/shm /run; do mount -t tmpfs tmp "$dir"; done
# The repository may be below /tmp, so nothing is mounted on /tmp.
chmod 1777 /tmp
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t securityfs security /sys/kernel/security
ln -sfn /proc/self/fd /dev/fd
# Tests mount files of their own over this one.
: >/etc/resolv.conf
# Loads modules that the kernel does not load on demand.
for module in veth sch_ingress cls_bpf act_bpf nf_tables dummy tun 8021q; do modprobe -q "$module"; done
ip link set lo up
ulimit -n 65536

say() { echo "@@ $*"; }

# Links like those between machines: clients, the server and peers each have a namespace.
links_up() {
  local name link
  ip netns add server
  # Programs query the kernel's features over loopback.
  ip -n server link set lo up
  for name in c p; do
    [ $name = c ] && link=1 || link=2
    ip netns add $name
    ip link add $name netns server type veth peer name $name netns $name
    ip -n server addr add 10.77.$link.1/24 dev $name
    ip -n server addr add fd77:$link::1/64 dev $name nodad
    ip -n $name addr add 10.77.$link.2/24 dev $name
    ip -n $name addr add fd77:$link::2/64 dev $name nodad
    ip -n server link set $name up
    ip -n $name link set $name up
    ip -n $name link set lo up
    # XDP on a veth sees only checksums that the sender has written, and redirects only to an end that receives through NAPI.
    ip netns exec $name ethtool -K $name tx off gro on >/dev/null
  done
  ip netns exec p turnpike reflect --listen 10.77.2.2:3480 --listen '[fd77:2::2]:3480' >/run/reflect 2>&1 &
}

load() { # PATH KIND FAMILY FLAGS...
  local path=$1 kind=$2 family=$3 server=10.77.1.1 peer=10.77.2.2 try
  shift 3
  [ "$family" = 6 ] && server='[fd77:1::1]' peer='[fd77:2::2]'
  # An emulated processor loses datagrams when its host stalls; losses caused by the data path itself recur.
  for try in 1 2 3; do
    rm -f /run/load.json
    ip netns exec c timeout 60 turnpike load turn "$server:3478" --peer "$peer:3480" --clients 50 --threads 1 \
      --duration 3 --json /run/load.json "$@" >/run/load 2>&1 || tail -n 3 /run/load
    [ -s /run/load.json ] && say load "$path" "$kind" "$(tr -d '\n' </run/load.json)"
    grep -q '^{"sent":[0-9]*,"received":[0-9]*,"lost":0,' /run/load.json && break
  done
}

relay() { # PATH
  local path=$1 pid try way
  TURNPIKE_AUTH_REQUIRED=false ip netns exec server turnpike serve --listen 10.77.1.1:3478 --listen '[fd77:1::1]:3478' \
    --relay-ip 10.77.2.1 --relay-ip fd77:2::1 --allow-peer 10.77.0.0/16 --allow-peer fd77::/16 --workers 1 \
    --admin unix:/run/admin.sock --datapath "$path" >/run/serve 2>&1 &
  pid=$!
  for ((try = 0; try < 300; try++)); do
    kill -0 $pid 2>/dev/null && ! grep -q 'admin interface on unix:' /run/serve || break
    sleep 0.2
  done
  if ! kill -0 $pid 2>/dev/null; then
    say refused "$path" "$(tail -n 1 /run/serve)"
    return
  fi
  cat /run/serve
  way=$(sed -n 's/.* data path kernel: attached to .*(\([a-z-]*\)).*/\1/p' /run/serve)
  say offered "$path" "${way:-$(sed -n 's/.* data path \([a-z]*\): .*; workers: .*/\1/p' /run/serve)}"
  say sandbox "$(sed -n 's/.* sandbox: //p' /run/serve | head -n 1)"
  load "$path" steady 4 --rate 1000
  load "$path" steady6 6 --rate 1000
  load "$path" bursts 4 --rate 3000 --burst 16
  sleep 1.5
  say across "$path" "$(curl -s --unix-socket /run/admin.sock http://localhost/metrics |
    grep '^turnpike_kernel_datagrams_total' | sed 's/.* //' | paste -sd+ | sed 's/^$/0/')"
  kill $pid
  wait $pid
}

run_tests() { # NAME
  local name=$1 test
  say tests "$name"
  if ! cd "$(cat "/trial/tests/$name.dir")"; then
    say exit "$name" 127
    return
  fi
  # Property tests would take half an hour on an emulated processor with the default number of cases.
  PROPTEST_CASES=1000 RUST_BACKTRACE=0 timeout 1500 "/trial/tests/$name" --color never --show-output --test-threads 4 2>&1 | tee /run/tests
  say exit "$name" "${PIPESTATUS[0]}"
  # The machine may have been busy, so a test counts as failed only if it also fails when run alone. The second run uses
  # one processor: if a thread moves to another processor while an emulated processor stalls, loopback reorders its
  # datagrams.
  sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' /run/tests | while read -r test; do
    if RUST_BACKTRACE=0 timeout 300 taskset 1 "/trial/tests/$name" --color never --exact "$test" >/run/alone 2>&1; then
      say alone "$name" "$test"
    else
      cat /run/alone
      say failed "$name" "$test"
    fi
  done
  cd /
}

# The firmware does not end its last line.
echo
say kernel "$(uname -r)" "$(uname -m)"
links_up
while read -r path; do relay "$path"; done </trial/paths
for test in /trial/tests/*.dir; do
  [ -e "$test" ] && run_tests "$(basename "$test" .dir)"
done
say end
echo o >/proc/sysrq-trigger
sleep 60
