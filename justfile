# Short names for the commands in CONTRIBUTING.md; `just` lists them.

_list:
    @just --list --unsorted

# Run a server with a generated credential
serve *FLAGS:
    cargo run --release -- serve {{FLAGS}}

# Run all steps of continuous integration, or only some
test *STEPS:
    ./test {{STEPS}}

# Run the quick steps: format, lints, unit tests
quick:
    ./test format lints house unit

# Count instructions per packet against the budgets
instructions:
    cargo xtask instructions

# Build the binary with symbols and frame pointers, for perf
profiling:
    cargo profiling
