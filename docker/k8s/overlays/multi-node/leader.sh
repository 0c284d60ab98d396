#!/bin/sh
# Runs the server where mpirun can start the executor's processes on every pod of the group.
set -eu
name=${LWS_LEADER_ADDRESS%%.*}
domain=${LWS_LEADER_ADDRESS#*.}
ssh_options="-p 2222 -i /ssh/id -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
echo "localhost slots=$GPUS" > /tmp/hosts
worker=1
while [ "$worker" -lt "$LWS_GROUP_SIZE" ]; do
  host=$name-$worker.$domain
  # shellcheck disable=SC2086  # several words
  until ssh $ssh_options "$host" true; do sleep 2; done
  echo "$host slots=$GPUS" >> /tmp/hosts
  worker=$((worker + 1))
done
exec mpirun -n 1 --hostfile /tmp/hosts --mca plm_rsh_args "$ssh_options" -x PATH -x LD_LIBRARY_PATH \
  /opt/venv/bin/python -m launcher /config/serving.toml
