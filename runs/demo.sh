#!/usr/bin/env bash
# The demo: a reasoner from nothing, on 2 CPU cores (about 2 GB resident). What to expect: README, three seeds as measured.
exec "$(dirname "$0")/launch.sh" 1 1 "$@"
