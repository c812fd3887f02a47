#!/usr/bin/env bash
# The demo: a reasoner from nothing. Any machine with 2 CPU cores and 4 GB; about 2 minutes.
# Expect: held-out accuracy 0.27 -> 0.99, response length 12 -> 24 tokens (README, three seeds).
exec "$(dirname "$0")/launch.sh" 1 1 "$@"
