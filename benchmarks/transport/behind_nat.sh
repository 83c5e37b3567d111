#!/bin/bash
# Trains on two hosts that cannot dial each other, by a relay between them, or directly for comparison; needs root.
#     benchmarks/transport/behind_nat.sh relay|direct FOLDER
# Prints the bytes of both hosts by their kernels' counters. With relay, the machine between them passes no packets on,
# and keeps what it sees on both cables in FOLDER/capture-*.
mode=$1 folder=$2 name=tw$$
mkdir -p "$folder" && cd "$folder" || exit 1
on() { ip netns exec "$name$1" "${@:2}"; }
until_line() { for _ in $(seq 3000); do grep -q "$1" "$2" 2> /dev/null && return; sleep 0.2; done; echo "no line '$1' in $2"; exit 1; }
clean() { kill $relay $taps 2> /dev/null; for host in r a b; do ip netns delete "$name$host" 2> /dev/null; done; }
trap clean EXIT
for host in r a b; do ip netns add "$name$host"; ip -n "$name$host" link set lo up; done
for number in 1 2; do
  host=$([ $number = 1 ] && echo a || echo b)
  ip -n "${name}r" link add "v$host" type veth peer name eth0 netns "$name$host"
  ip -n "${name}r" address add "10.9.$number.1/24" dev "v$host"; ip -n "${name}r" link set "v$host" up
  ip -n "$name$host" address add "10.9.$number.2/24" dev eth0; ip -n "$name$host" link set eth0 up
  ip -n "$name$host" route add default via "10.9.$number.1"
done
on r sysctl -qw net.ipv4.ip_forward=$([ "$mode" = relay ] && echo 0 || echo 1)
more=()
if [ "$mode" = relay ]; then
  on r thinwire relay --port 29500 > relay.log 2>&1 & relay=$!
  until_line "at port" relay.log
  more=(--relay 10.9.1.1:29500)
  for cable in va vb; do
    on r python3 -c "
import socket, sys
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)); tap.bind((sys.argv[1], 0))
with open('capture-' + sys.argv[1], 'wb') as file:
    while True: file.write(tap.recv(65536))" $cable & taps="$taps $!"
  done
fi
on a thinwire train --elastic "${more[@]}" --replicas 1 --begin-with 2 --steps 100 --sync-interval 10 --model nano \
  --batch-size 2 --seq-len 32 --threads 1 --address 10.9.1.2 --out a > a.log 2>&1 & first=$!
until_line "others join" a.log
# each host reaches the relay at its own cable
grep -o "thinwire://.*" a.log | sed s/10.9.1.1/10.9.2.1/ > address
on b thinwire join - --threads 1 --out b < address > b.log 2>&1 & second=$!
wait $first; echo "first host: exit code $?"; wait $second; echo "second host: exit code $?"
for host in a b; do on $host grep eth0 /proc/net/dev | awk -v host=$host '{print host ": " $2 " bytes in, " $10 " out"}'; done
echo "rounds: $(grep -c . a/rounds-replica-0.jsonl)"
