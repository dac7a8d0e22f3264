#!/bin/bash
# Pid 1 of the rack: the network switch of the test cluster, and the pid namespace around all its
# machines. The host sees no new interface, and everything dies with this process.
# usage: rack_init.sh FOLDER
set -eu
# The mount namespace is the host's, and so is /proc: this is the pid by which the host knows us.
read -r host_pid _ </proc/self/stat
ip link set lo up
ip link add switch type bridge
ip link set switch up
echo "$host_pid" >"$1/machines/rack/pid.new"; mv "$1/machines/rack/pid.new" "$1/machines/rack/pid"
touch "$1/machines/rack/ready"
# As pid 1, bash reaps what machines that lost their power leave behind. It ignores SIGTERM.
while :; do sleep 3600 & wait $! || true; done
