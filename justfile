# Short names for what CONTRIBUTING.md explains; `just` lists them.

_list:
    @just --list --unsorted

# A working server with a credential that it makes up
serve *FLAGS:
    cargo run --release -- serve {{FLAGS}}

# Everything that continuous integration runs, or some steps of it
test *STEPS:
    ./test {{STEPS}}

# The quick part: format, lints, unit tests
quick:
    ./test format lints house unit

# What a packet costs in instructions, against the budgets
instructions:
    cargo xtask instructions

# The binary with symbols and frame pointers, for perf
profiling:
    cargo profiling
