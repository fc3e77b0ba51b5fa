//! Checks the examples, commands and metrics of docs/forward.md.

use super::*;

const PAGE: &str = include_str!("../../../../../docs/forward.md");

fn blocks(language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block: Option<String> = None;
    for line in PAGE.lines() {
        if line.starts_with("```") {
            match block.take() {
                Some(text) => found.push(text),
                None if line == format!("```{language}") => block = Some(String::new()),
                None => block = None,
            }
        } else if let Some(text) = &mut block {
            text.push_str(line);
            text.push('\n');
        }
    }
    found
}

fn rules_of(command: &str) -> Vec<String> {
    let words = command.split(' ').skip(2).filter(|word| word.contains("://"));
    words
        .map(|word| match word.strip_prefix('\'').and_then(|word| word.strip_suffix('\'')) {
            Some(quoted) => quoted.to_owned(),
            None => {
                assert!(!word.contains(['?', '&', '[', '*', '\'']), "a shell would expand {word}");
                word.to_owned()
            }
        })
        .collect()
}

#[test]
fn every_file_in_the_page_is_valid() {
    let files = blocks("toml");
    assert!(files.len() >= 4, "{files:?}");
    for text in files {
        let loaded = from_file(&text).unwrap_or_else(|errors| panic!("{errors}\n{text}"));
        assert_eq!(loaded.format, Some(Format::Turnpike), "{text}");
    }
    let files = blocks("rinetd");
    assert!(!files.is_empty());
    for text in files {
        let loaded = from_file(&text).unwrap_or_else(|errors| panic!("{errors}\n{text}"));
        assert_eq!(loaded.format, Some(Format::Rinetd), "{text}");
    }
}

#[test]
fn every_command_in_the_page_has_valid_rules() {
    let commands = blocks("sh").concat();
    assert!(commands.lines().count() >= 8, "{commands}");
    for line in commands.lines() {
        assert!(line.starts_with("turnpike forward "), "{line}");
        let rules = rules_of(line);
        let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
        let loaded = from_arguments(&rules).unwrap_or_else(|errors| panic!("{errors}"));
        assert_eq!(loaded.settings.rules.len(), rules.len(), "{line}");
        assert!(!rules.is_empty(), "{line}");
    }
}

#[test]
fn every_socat_replacement_is_a_valid_rule() {
    let (_, table) = PAGE.split_once("## From socat").expect("the section");
    let rows: Vec<&str> = table.lines().filter(|line| line.contains("://")).collect();
    assert!(rows.len() >= 7, "{rows:?}");
    for row in rows {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().expect("a cell");
        argument(cell.trim_matches('`'));
    }
}
