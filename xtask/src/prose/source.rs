//! Prose in the files of the repository: comments, strings, names of tests, documents and pages.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::phrases::{Block, Finding, in_comment, in_test_name, in_text};
use crate::Failure;

/// Configurations for earlier releases, which must not change.
const UNCHANGEABLE: &str = "tests/configurations/";
/// This file is not checked, because it lists the phrases.
const EXAMPLES: &str = "xtask/src/prose/phrases.rs";

/// Kind of file, which decides where its prose is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Comments, strings of several words, and names of tests.
    Rust,
    /// Comments and names of tests, but not strings, which are input and expected output.
    RustTests,
    /// Everything except code blocks.
    Markdown,
    /// Everything.
    Page,
    /// Comments that begin with `#`.
    Script,
    /// Comments that begin with `//`.
    C,
}

impl Kind {
    pub(super) fn of(path: &str) -> Option<Self> {
        if path.starts_with(UNCHANGEABLE) || path == EXAMPLES {
            return None;
        }
        let is_test = path.split('/').any(|part| part == "tests" || part == "tests.rs");
        let (_, name) = path.rsplit_once('/').unwrap_or(("", path));
        Some(match name.rsplit_once('.').map(|(_, extension)| extension) {
            Some("rs") if is_test => Self::RustTests,
            Some("rs") => Self::Rust,
            Some("md") => Self::Markdown,
            Some("html" | "js" | "mjs") => Self::Page,
            Some("toml" | "yaml" | "yml" | "sh" | "py" | "conf" | "service" | "socket") => Self::Script,
            Some("c" | "h" | "go" | "java") => Self::C,
            None if ["test", "justfile"].contains(&name) => Self::Script,
            _ => return None,
        })
    }

    pub(super) fn findings(self, text: &str) -> Result<Vec<Finding>, Failure> {
        let comments = |markers| comments(text, markers).iter().flat_map(|block| in_comment(block)).collect();
        let mut found: Vec<Finding> = match self {
            Self::Markdown => in_text(&outside_code_blocks(text)),
            Self::Page => in_text(&numbered(text)),
            Self::Script => comments(&["#"]),
            Self::C => comments(&["//"]),
            Self::Rust | Self::RustTests => {
                let mut found: Vec<Finding> = comments(&["///", "//!", "//"]);
                let tokens: TokenStream = text.parse().map_err(|why| format!("not Rust: {why}"))?;
                in_tokens(tokens, self == Self::Rust, &mut found);
                found
            }
        };
        found.sort_by_key(|finding| finding.line);
        Ok(found)
    }
}

fn numbered(text: &str) -> Vec<(usize, &str)> {
    text.lines().enumerate().map(|(at, line)| (at + 1, line)).collect()
}

pub(crate) fn outside_code_blocks(text: &str) -> Vec<(usize, &str)> {
    let mut inside = false;
    let mut is_prose = |line: &str| {
        let is_fence = line.trim_start().starts_with("```");
        inside ^= is_fence;
        !inside && !is_fence
    };
    numbered(text).into_iter().filter(|(_, line)| is_prose(line)).collect()
}

/// Lines of comments, without markers, in blocks of consecutive lines with the same marker. `markers` must be ordered from long to short.
fn comments<'a>(text: &'a str, markers: &[&'static str]) -> Vec<Vec<(usize, &'a str)>> {
    let mut blocks: Vec<Vec<(usize, &str)>> = Vec::new();
    let mut previous = None;
    for (number, line) in numbered(text) {
        let line = line.trim_start();
        let marker = markers.iter().find(|marker| line.starts_with(**marker));
        if let Some(marker) = marker {
            let entry = (number, &line[marker.len()..]);
            match blocks.last_mut() {
                Some(block) if previous == Some(marker) => block.push(entry),
                _ => blocks.push(vec![entry]),
            }
        }
        previous = marker;
    }
    blocks
}

/// Finds phrases in test names and, outside tests, in strings of several words.
fn in_tokens(tokens: TokenStream, strings: bool, found: &mut Vec<Finding>) {
    let mut tokens = tokens.into_iter().peekable();
    let (mut is_test, mut for_tests) = (false, false);
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                let is_attribute = |token: &TokenTree| matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket);
                let Some(TokenTree::Group(group)) = tokens.next_if(is_attribute) else { continue };
                match group.stream().to_string().as_str() {
                    "test" => is_test = true,
                    "cfg (test)" | "cfg(test)" => for_tests = true,
                    // Doc comments were already checked as comments.
                    text if text.starts_with("doc =") => {}
                    _ => in_tokens(group.stream(), strings && !for_tests, found),
                }
            }
            TokenTree::Ident(ident) if ident == "fn" => {
                if let Some(TokenTree::Ident(name)) = tokens.peek().filter(|_| is_test) {
                    found.extend(in_test_name(name.span().start().line, &name.to_string()));
                }
                is_test = false;
            }
            TokenTree::Punct(punct) if punct.as_char() == ';' => for_tests = false,
            TokenTree::Group(group) => {
                in_tokens(group.stream(), strings && !for_tests, found);
                for_tests &= group.delimiter() != Delimiter::Brace;
            }
            TokenTree::Literal(literal) if strings && !for_tests => {
                let line = literal.span().start().line;
                let syn::Lit::Str(text) = syn::Lit::new(literal) else { continue };
                let text = text.value();
                if text.contains(' ') {
                    let lines: Vec<(usize, &str)> =
                        text.lines().enumerate().map(|(at, text)| (line + at, text)).collect();
                    let block: &Block<'_> = &lines;
                    found.extend(in_text(block));
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let kind = Kind::of(path).expect("this kind of file contains prose");
        kind.findings(text).expect("the text parses").iter().map(ToString::to_string).collect()
    }

    const RUST: &str = r##"//! Of files.
// Plain.
/// Plain,
/// and anew.
#[arg(help = "what is read")]
fn f() {
    g("is told", "told", r#"raw, he says"#); // With a statement: not counted.
}
#[cfg(test)]
use x::y;
#[cfg(test)]
mod tests {
    /// Who is it
    #[test]
    fn nobody_is_there() { assert!(g("is told")); }
    fn nobody_calls() {}
}
"##;

    #[test]
    fn comments_strings_and_test_names_of_rust_are_prose() {
        let expected = [
            "1: Of …",
            "4: anew",
            "5: what is",
            "7: told",
            "7: says",
            "13: Who …",
            "15: not plain: nobody_is_there",
        ];
        assert_eq!(found("crates/a/src/a.rs", RUST), expected);
    }

    #[test]
    fn strings_of_tests_are_not_counted() {
        let expected = ["1: Of …", "4: anew", "13: Who …", "15: not plain: nobody_is_there"];
        assert_eq!(found("crates/a/tests/a.rs", RUST), expected);
        assert_eq!(found("crates/a/src/a/tests.rs", RUST), expected);
    }

    #[test]
    fn code_blocks_of_documents_are_not_counted() {
        assert_eq!(found("a.md", "Of it.\n```console\nnobody\n```\nlest\n"), ["5: lest"]);
    }

    #[test]
    fn pages_scripts_and_c_have_prose() {
        assert_eq!(found("a.html", "<p>nobody</p>\n"), ["1: nobody"]);
        assert_eq!(found("a.toml", "# Of it\nwho = \"nobody\"\n"), ["1: Of …"]);
        assert_eq!(found("test", "# Plain\n\n  # Of it\n"), ["3: Of …"]);
        assert_eq!(found("a.c", "// Of it\nint whom;\n"), ["1: Of …"]);
        assert_eq!(Kind::of("tests/configurations/a.toml"), None);
        assert_eq!(Kind::of("a.hex"), None);
    }

    #[test]
    fn a_new_marker_starts_a_new_comment() {
        assert_eq!(found("a.rs", "//! Plain\n/// Of it\n// By it\nfn f() {}\n"), ["2: Of …", "3: By …"]);
    }
}
