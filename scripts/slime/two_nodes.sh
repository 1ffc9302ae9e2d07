#!/usr/bin/env bash
# Two machines out of one, for tests of several nodes: network namespaces with an address each, joined by a cable. A command runs in the
# first, scripts/train/join_ray.sh in the second, as on two machines; what is left when the command ends is stopped and taken away.
#   bash scripts/slime/two_nodes.sh COMMAND...        e.g. bash scripts/train/run_tandem_grpo.sh engine.mode=fused
#   GPUS_PER_NODE     GPUs that each node offers                                       (default: 1)
#   NODE_CPUS         CPUs that each node says it has: slime's actors ask for more     (default: 16)
#   SUBNET            the first three numbers of their addresses                       (default: 10.77.0)
#   LOSE_WHEN         a file; when it is there, the second node is lost: its cable is cut and its processes are killed (default: never)
#   SECOND_LOG        what the second node says                                        (default: second-node.log in OUTPUT_ROOT)
#   DRY_RUN=1         prints the commands
# Both nodes see the same files. Needs root (ip netns); the network namespaces of this machine stay as they are. Only process groups that were
# started here are stopped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
GPUS_PER_NODE="${GPUS_PER_NODE:-1}" NODE_CPUS="${NODE_CPUS:-16}" SUBNET="${SUBNET:-10.77.0}" OUTPUT_ROOT="${OUTPUT_ROOT:-$REPO/runs}"
need_number GPUS_PER_NODE
need_number NODE_CPUS 16
[[ "$SUBNET" =~ ^[0-9]{1,3}(\.[0-9]{1,3}){2}$ ]] || refuse SUBNET "$SUBNET" "three numbers of an address" "e.g. SUBNET=10.77.0"
[[ $# -gt 0 ]] || refuse COMMAND "" "what the first node is to run" "e.g. bash scripts/train/run_tandem_grpo.sh"
if [[ -n "${LOSE_WHEN:-}" && -e "$LOSE_WHEN" ]]; then refuse LOSE_WHEN "$LOSE_WHEN" "a file that comes later" "remove it"; fi
if [[ "${DRY_RUN:-0}" != 1 ]] && ! why="$(unshare --net true 2>&1)"; then
  refuse "network namespaces" "$why" "a kernel and a user that may make them" "run as root, in a container with CAP_SYS_ADMIN"
fi
name="tandem$$"
first="$name-1" second="$name-2"
head="$SUBNET.1"
groups=()
made=()
watcher=""

# shellcheck disable=SC2329 # called by clean
# end_group GROUP: ends one that was started here.
end_group() {
  local end=$((SECONDS + 20))
  kill -TERM -- "-$1" 2> /dev/null || return 0
  while kill -0 -- "-$1" 2> /dev/null && [[ $SECONDS -lt $end ]]; do sleep 0.2; done
  kill -KILL -- "-$1" 2> /dev/null || true
}

# left_in NAMESPACE: ends what still runs there. Ray's workers and engines have sessions of their own; whoever is in the namespace was
# started by what was started here.
left_in() {
  local pid
  for pid in $(ip netns pids "$1" 2> /dev/null); do kill -KILL "$pid" 2> /dev/null || true; done
}

# shellcheck disable=SC2329 # a trap
clean() {
  local group namespace
  trap - EXIT INT TERM
  if [[ -n "$watcher" ]]; then kill "$watcher" 2> /dev/null || true; fi # no group of its own, as it kills groups
  for group in "${groups[@]}"; do end_group "$group"; done
  for namespace in "${made[@]}"; do
    left_in "$namespace"
    ip netns delete "$namespace" 2> /dev/null || true
  done
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Both ends are called eth0, as in two machines: GLOO_SOCKET_IFNAME holds for both. A default route lets programs find their own address.
made=("$first" "$second")
run ip netns add "$first"
run ip netns add "$second"
run ip link add eth0 netns "$first" type veth peer name eth0 netns "$second"
for node in 1 2; do
  run ip -n "$name-$node" link set lo up
  run ip -n "$name-$node" address add "$SUBNET.$node/24" dev eth0
  run ip -n "$name-$node" link set eth0 up
  run ip -n "$name-$node" route add default via "$SUBNET.$((3 - node))"
done
export NODES=2 GPUS_PER_NODE MASTER_ADDR="$head" GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export RAY_START_FLAGS="--num-cpus=$NODE_CPUS ${RAY_START_FLAGS:-}"
export no_proxy="$SUBNET.1,$SUBNET.2,127.0.0.1,localhost${no_proxy:+,$no_proxy}"
export NO_PROXY="$no_proxy"
JOB_ENV="${JOB_ENV:-} no_proxy NO_PROXY"
export JOB_ENV

# Joined again and again: the head is there only when the command has started it.
# shellcheck disable=SC2016 # expanded by the shell that it is given to
join='until bash "$1/scripts/train/join_ray.sh" --num-cpus "$2"; do sleep 2; done'
if [[ "${DRY_RUN:-0}" == 1 ]]; then
  run setsid ip netns exec "$second" env DRY_RUN=0 bash -c "$join" join "$REPO" "$NODE_CPUS"
  run ip netns exec "$first" "$@"
  exit 0
fi
mkdir -p "$OUTPUT_ROOT"
log="${SECOND_LOG:-$OUTPUT_ROOT/second-node.log}"
setsid ip netns exec "$second" bash -c "$join" join "$REPO" "$NODE_CPUS" > "$log" 2>&1 &
groups+=("$!")
setsid ip netns exec "$first" "$@" &
command=$!
groups+=("$command")
if [[ -n "${LOSE_WHEN:-}" ]]; then
  (
    until [[ -e "$LOSE_WHEN" ]]; do sleep 0.5; done
    echo "the second node is lost now"
    ip -n "$second" link set eth0 down
    kill -KILL -- "-${groups[0]}" 2> /dev/null || true
    left_in "$second"
  ) &
  watcher=$!
fi
code=0
wait "$command" || code=$?
exit "$code"
