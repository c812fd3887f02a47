#!/usr/bin/env bash
# The demo makes a tiny base model and trains it, on 2 CPU cores with about 2 GB of memory. docs/stripped.md has the
# measured results of three seeds.
exec "$(dirname "$0")/launch.sh" 1 1 "$@"
