//! Usage errors: clap's messages, with hints for coturn's options, and for files and addresses that are
//! given without their option.

use std::{env, net::SocketAddr, process::ExitCode};

use clap::{
    CommandFactory as _, Error,
    builder::StyledStr,
    error::{ContextKind, ContextValue, ErrorKind},
};
use turnpike_convert::coturn;

use crate::args::Cli;

/// Prints clap's error and returns its exit code; for an option of coturn, the error includes a hint to
/// `turnpike import`.
pub(crate) fn show(mut error: Error) -> ExitCode {
    if let Some(option) = coturns(&arguments()).filter(|_| error.kind() == ErrorKind::UnknownArgument) {
        return crate::fail(
            crate::BAD_USAGE,
            &format_args!(
                "{option} is an option of coturn: `turnpike import coturn FILE` translates a turnserver.conf, and \
                 `turnpike import coturn -- ARGUMENTS` a command line"
            ),
        );
    }
    if let Some(tip) = missing_option(&arguments(), &error) {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    }
    let code = u8::try_from(error.exit_code()).unwrap_or(crate::BAD_USAGE);
    if error.use_stderr() && wants_json() {
        let text = error.render().to_string();
        return crate::fail(code, &text.strip_prefix("error: ").unwrap_or(&text));
    }
    let _ = error.print();
    ExitCode::from(code)
}

/// Returns true if the command line has `--json`, even if the rest does not parse.
pub(crate) fn wants_json() -> bool {
    let mut words = env::args_os().skip(1).take_while(|word| word != "--");
    words.any(|word| word.to_str().is_some_and(|word| word == "--json" || word.starts_with("--json=")))
}

fn arguments() -> Vec<String> {
    env::args_os().map(|word| word.to_string_lossy().into_owned()).collect()
}

fn coturns(arguments: &[String]) -> Option<&str> {
    let [_, command, rest @ ..] = arguments else { return None };
    let name =
        |word: &str| word.strip_prefix("--").map(|word| word.split('=').next().unwrap_or(word).to_owned());
    let ours = Cli::command();
    let is_ours = |name: &str| {
        ours.find_subcommand(command)
            .is_some_and(|ours| ours.get_arguments().any(|flag| flag.get_long() == Some(name)))
    };
    let is_coturns =
        |word: &&String| name(word).is_some_and(|name| coturn::is_option(&name) && !is_ours(&name));
    let option = rest.iter().find(is_coturns)?;
    ["serve", "check-config"].contains(&command.as_str()).then(|| option.split('=').next().unwrap_or(option))
}

/// Suggests the option for a file or address given without one.
fn missing_option(arguments: &[String], error: &Error) -> Option<String> {
    let Some(ContextValue::String(stray)) = error.get(ContextKind::InvalidArg) else { return None };
    if stray.starts_with('-') || error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let cli = Cli::command();
    let mut commands = arguments.iter().skip(1);
    let mut command = cli.find_subcommand(commands.next()?)?;
    while let Some(below) = commands.next().and_then(|name| command.find_subcommand(name)) {
        command = below;
    }
    let takes = |option: &str| command.get_arguments().any(|flag| flag.get_long() == Some(option));
    let is_admin = stray.parse::<SocketAddr>().is_ok() || stray.contains("://") || stray.starts_with("unix:");
    let option = if is_admin { "admin" } else { "config" };
    takes(option).then(|| format!("use '--{option} {stray}'"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn file_or_address_without_its_option_gets_a_hint() {
        let tip = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let error = Cli::try_parse_from(&words).map(drop).expect_err("the last word is unexpected");
            missing_option(&words, &error)
        };
        let file = Some("use '--config turnpike.toml'");
        assert_eq!(tip("turnpike serve turnpike.toml").as_deref(), file);
        assert_eq!(tip("turnpike check-config turnpike.toml").as_deref(), file);
        let address = Some("use '--admin 127.0.0.1:9641'");
        assert_eq!(tip("turnpike health 127.0.0.1:9641").as_deref(), address);
        assert_eq!(tip("turnpike fleet status 127.0.0.1:9641").as_deref(), address);
        assert_eq!(tip("turnpike health turnpike.toml"), None);
        assert_eq!(tip("turnpike serve --lissten"), None);
    }

    #[test]
    fn coturn_options_are_found_among_others() {
        let found = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            coturns(&words).map(str::to_owned)
        };
        assert_eq!(found("turnpike serve -n --lt-cred-mech").as_deref(), Some("--lt-cred-mech"));
        assert_eq!(found("turnpike serve --realm x --min-port=50000").as_deref(), Some("--min-port"));
        assert_eq!(found("turnpike check-config --no-tls").as_deref(), Some("--no-tls"));
        assert_eq!(found("turnpike serve --realm x --user a:b --lissten x"), None);
        assert_eq!(found("turnpike probe --no-tls"), None);
        assert_eq!(found("turnpike"), None);
    }

    #[test]
    fn serve_flags_are_not_taken_for_coturn_options() {
        let cli = Cli::command();
        let serve = cli.find_subcommand("serve").expect("serve exists");
        for name in serve.get_arguments().filter_map(clap::Arg::get_long) {
            let words = ["turnpike".to_owned(), "serve".to_owned(), format!("--{name}")];
            assert_eq!(coturns(&words), None);
        }
    }
}
