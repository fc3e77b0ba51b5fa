//! x
fn main() -> std::process::ExitCode {
    std::process::ExitCode::from(turnpike_lab::main(std::env::args_os()))
}
