//! Wrong usage: clap's own words, and a hint for options of coturn.

use std::env;

use clap::{CommandFactory as _, Error, error::ErrorKind};
use turnpike_config::import::coturn;

use crate::args::Cli;

/// Exits with clap's code; options of coturn get a line that names the way to translate them.
pub(crate) fn exit(error: &Error) -> ! {
    let arguments: Vec<String> = env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    match coturns(&arguments).filter(|_| error.kind() == ErrorKind::UnknownArgument) {
        Some(option) => {
            crate::tell(format_args!(
                "turnpike: {option} is an option of coturn: `turnpike import coturn FILE` translates a turnserver.conf, and \
                 `turnpike import coturn -- ARGUMENTS` a command line"
            ));
            std::process::exit(crate::BAD_USAGE.into());
        }
        None => error.exit(),
    }
}

/// An option of coturn among the arguments of `serve` or `check-config`; those two have none of its name, or clap would know it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_coturn_are_known_among_others() {
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
    fn no_flag_of_serve_is_taken_for_coturns() {
        let cli = Cli::command();
        let serve = cli.find_subcommand("serve").expect("there is one");
        for name in serve.get_arguments().filter_map(clap::Arg::get_long) {
            let words = ["turnpike".to_owned(), "serve".to_owned(), format!("--{name}")];
            assert_eq!(coturns(&words), None);
        }
    }
}
