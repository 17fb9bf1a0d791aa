#!/bin/bash
# First process of one machine of the test cluster, in namespaces of its own: makes the machine look like a
# computer, then becomes a reaping init in front of the machine's main program.
#
#   boot.sh MACHINE STATE ROOT PROCTRACK PROGRAM...
#
# Everything mounted here is in the machine's own mount namespace and goes with its last process.
set -euo pipefail
machine=$1 state=$2 root=${3%/} proctrack=$4
shift 4

if [ "${SLURM_ELASTIC_BOOT_STAGE:-1}" = 1 ]; then
    hostname "$machine"
    if [ -n "$root" ]; then
        # Another Debian: the file systems that jobs share, the job's Python, and the users are the host's.
        for directory in /dev /sys /tmp /var/tmp /opt/slurm-elastic /usr/lib/python3 /usr/lib/python3.11; do
            mount --rbind "$directory" "$root$directory"
        done
        for file in /etc/passwd /etc/group /usr/bin/python3.11; do
            mount --bind "$file" "$root$file"
        done
    fi
    mount --bind "$state/hosts" "$root/etc/hosts"
    mount -t tmpfs -o mode=0755 tmpfs "$root/run"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t tmpfs -o mode=1777 tmpfs "$root/var/local"
    if [ "$proctrack" = cgroup ]; then
        # Slurm names its groups after node and job alone, so each machine gets a hierarchy that starts at
        # its own group. cgroup v1's freezer can be mounted even where the host uses cgroup v2.
        mount -t tmpfs -o mode=0755 tmpfs "$root/sys/fs/cgroup"
        mkdir "$root/sys/fs/cgroup/freezer"
        mount -t cgroup -o freezer cgroup "$root/sys/fs/cgroup/freezer"
        group=$root/sys/fs/cgroup/freezer/slurm-elastic/${state##*/}/$machine
        # Whoever removes the last other cluster removes the common parent, perhaps in between.
        mkdir -p "$group" || mkdir -p "$group"
        echo $$ >"$group/cgroup.procs"
        umount "$root/sys/fs/cgroup/freezer"
        export SLURM_ELASTIC_BOOT_STAGE=2
        exec unshare --cgroup -- /bin/bash "$0" "$machine" "$state" "$root/" "$proctrack" "$@"
    fi
else
    unset SLURM_ELASTIC_BOOT_STAGE
    mount -t cgroup -o freezer cgroup "$root/sys/fs/cgroup/freezer"
fi

mount -t proc proc "$root/proc"
mkdir -m 0755 "$root/run/munge"
chroot "$root/" /usr/sbin/munged --key-file="$state/munge.key" --seed-file=/run/munge/seed \
    --log-file="$state/log/munged.$machine.log"
exec chroot "$root/" /usr/bin/tini -- "$@"
