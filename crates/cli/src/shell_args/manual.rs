//! Manual pages: the output of clap_mangen, with the text after the flags split into sections.

use std::{fs, io, io::Write, path::Path};

use clap::Command;
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

pub(super) fn write(command: Command, out: &mut dyn Write) -> io::Result<()> {
    page(&built(command), out)
}

/// Writes turnpike.1, turnpike-serve.1 and so on.
pub(super) fn write_all(command: Command, directory: &Path) -> io::Result<()> {
    fn write_each(command: &Command, directory: &Path) -> io::Result<()> {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name());
        let mut text = Vec::new();
        page(command, &mut text)?;
        fs::write(directory.join(format!("{name}.1")), text)?;
        command.get_subcommands().try_for_each(|command| write_each(command, directory))
    }
    fs::create_dir_all(directory)?;
    write_each(&built(command), directory)
}

fn built(command: Command) -> Command {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    command
}

fn page(command: &Command, out: &mut dyn Write) -> io::Result<()> {
    let source = concat!("turnpike ", env!("CARGO_PKG_VERSION"));
    let before = command.clone().after_help(None).after_long_help(None);
    Man::new(before).manual("turnpike").source(source).render(out)?;
    let mut behind = Roff::new();
    if let Some(text) = command.get_after_long_help().or_else(|| command.get_after_help()) {
        sections(&text.to_string(), &mut behind);
    }
    if let Some((parent, _)) = command.get_bin_name().and_then(|name| name.rsplit_once(' ')) {
        behind.control("SH", ["SEE ALSO"]);
        behind.text([bold(parent.replace(' ', "-")), roman("(1)")]);
    }
    behind.to_writer(out)
}

/// Converts the help text after the flags. Lines are "Heading: text", "Heading:" or "Heading (text):"
/// followed by indented (verbatim) lines, or plain text.
fn sections(text: &str, roff: &mut Roff) {
    let mut verbatim = false;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let indented = line.starts_with(' ');
        if indented != verbatim {
            roff.control(if indented { "nf" } else { "fi" }, []);
            verbatim = indented;
        }
        match heading_of(line).filter(|_| !indented) {
            Some((heading, condition, rest)) => {
                roff.control("SH", [heading.to_uppercase().as_str()]);
                for text in [condition, rest].into_iter().filter(|text| !text.is_empty()) {
                    roff.text([roman(text)]);
                    roff.control("PP", []);
                }
            }
            None => _ = roff.text([roman(line.strip_prefix("  ").unwrap_or(line))]),
        }
    }
    if verbatim {
        roff.control("fi", []);
    }
}

/// Splits a line into heading, parenthesized condition and rest.
fn heading_of(line: &str) -> Option<(&str, &str, &str)> {
    /// Longer text before a colon is a sentence, not a heading.
    const LETTERS: usize = 20;
    let (heading, rest) =
        line.strip_suffix(':').map(|heading| (heading, "")).or_else(|| line.split_once(": "))?;
    let (heading, condition) = heading.split_once(" (").unwrap_or((heading, ""));
    (heading.len() <= LETTERS).then_some((heading, condition.trim_end_matches(')'), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_after_the_flags_becomes_sections() {
        let mut roff = Roff::new();
        let help = "This is not a heading, as it is too long: see?\nExamples (on one machine):\n  a --b c:d\n  .e\n\nExit codes: 0 done, 1: failed";
        sections(help, &mut roff);
        let page = roff.render();
        let (first, page) = page.split_once(".SH EXAMPLES\n").expect("a heading");
        assert!(first.ends_with("too long: see?\n") && !first.contains(".SH"), "{first}");
        assert!(page.starts_with("on one machine\n.PP\n.nf\n"), "{page}");
        let (examples, codes) = page.split_once(".fi\n.SH \"EXIT CODES\"\n").expect("a second section");
        assert!(examples.contains("c:d\n") && examples.contains("\\&.e\n"), "{examples}");
        assert!(codes.starts_with("0 done, 1: failed\n"), "{codes}");
    }
}
