#!/bin/bash
# Pid 1 of one machine of the test cluster. cluster.py starts it in new net, uts, pid, ipc and mount
# namespaces: usage: node_init.sh FOLDER NAME ADDRESS INTERFACE DECOY DECOY_ADDRESS TMP_MIB [SHARED_PATH...]
# DECOY_ADDRESS may be empty: then there is no such interface.
set -eu
folder=$1 name=$2 address=$3 interface=$4 decoy=$5 decoy_address=$6 tmp_mib=$7
shift 7
own=$folder/machines/$name

# /proc is still the host's, so this is the pid by which the host knows this process.
read -r host_pid _ </proc/self/stat

wait_for() { # wait_for SECONDS COMMAND...: until the command succeeds
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    if ((SECONDS >= end)); then
      echo "gave up waiting: $*"
      grep -hs "fatal:" "$own"/*.log | tail -n 3 || true # why a daemon has ended
      exit 1
    fi
    sleep 0.05
  done
}
port_answers() { (exec 3<>"/dev/tcp/$1/$2"); }

own_files() { # what each machine has for itself; everything else is the shared file system
  local path at=0
  mount --make-rprivate /
  mount -t proc proc /proc
  # Hold the shared paths open, lay private folders over /tmp and its like, put them back.
  mount -t tmpfs holder /mnt
  for path in "$@"; do
    at=$((at + 1)); mkdir /mnt/$at; mount --rbind "$path" /mnt/$at
  done
  mount -t tmpfs -o "mode=1777,size=${tmp_mib}m" tmp /tmp
  mount -t tmpfs -o mode=1777 shm /dev/shm
  mount -t tmpfs -o mode=755 run /run
  mount -t tmpfs -o mode=755 spool /var/spool
  at=0
  for path in "$@"; do
    at=$((at + 1)); mkdir -p "$path"; mount --move /mnt/$at "$path"
  done
  umount /mnt
  mkdir -p /run/munge /run/mysqld /run/lock /var/spool/slurmd /etc/slurm
  mount --bind "$folder/etc" /etc/slurm
  mount --bind "$folder/etc/hosts" /etc/hosts
  mount --bind "$folder/etc/nsswitch.conf" /etc/nsswitch.conf
  echo "$name" >"$own/hostname"
  mount --bind "$own/hostname" /etc/hostname
  hostname "$name"
}

own_network() { # cluster.py plugs the cable in as soon as it knows the pid
  echo "$host_pid" >"$own/pid.new"; mv "$own/pid.new" "$own/pid"
  wait_for 10 ip link show "$interface"
  ip link set lo up
  ip address add "$address/24" dev "$interface"
  ip link set "$interface" up
  if [ -n "$decoy_address" ]; then
    # Without an IPv6 address the kernel itself sends nothing: each packet is one of a program.
    ip link set "$decoy" addrgenmode none
    ip address add "$decoy_address/24" dev "$decoy"
    ip link set "$decoy" up
  fi
}

start_munge() {
  munged --key-file="$folder/etc/munge.key" --log-file="$own/munged.log" \
    --seed-file=/run/munge/seed --pid-file=/run/munge/munged.pid \
    --socket=/run/munge/munge.socket.2 --num-threads=2
}

start_database() {
  mariadbd --no-defaults --user=root --datadir="$folder/mysql" --socket=/run/mysqld/mysqld.sock \
    --pid-file=/run/mysqld/mysqld.pid --skip-networking --innodb-buffer-pool-size=64M \
    --innodb-log-file-size=8M --innodb-flush-log-at-trx-commit=0 \
    --innodb-lock-wait-timeout=900 --performance-schema=OFF >"$own/mariadb.log" 2>&1 &
  wait_for 30 mariadb -uroot -e 'select 1'
  slurmdbd
  wait_for 30 port_answers "$address" 6819
}

add_cluster() { # what slurmctld needs at its start; cluster.py adds accounts, users and limits
  if [ -z "$(sacctmgr -nP list cluster)" ]; then
    sacctmgr -i add cluster forge
    if [ -s "$folder/etc/qos" ]; then sacctmgr -i add qos "$(<"$folder/etc/qos")"; fi
  fi
}

own_files "$@"
own_network
start_munge
if [ "$name" = ctl ]; then
  start_database
  add_cluster
  slurmctld
else
  wait_for 60 port_answers ctl 6817
  slurmd
  wait_for 10 port_answers "$address" 6818
fi
touch "$own/ready"
# As pid 1, bash reaps what daemons and killed commands leave behind. It ignores SIGTERM.
while :; do sleep 3600 & wait $! || true; done
