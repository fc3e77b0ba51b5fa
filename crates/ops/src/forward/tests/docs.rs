//! docs/forward.md: its examples are configurations, its commands rules, its metrics those that there are.

use super::*;

const PAGE: &str = include_str!("../../../../../docs/forward.md");

/// The blocks of one language.
fn blocks(language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block: Option<String> = None;
    for line in PAGE.lines() {
        if line.starts_with("```") {
            match block.take() {
                Some(text) => found.push(text),
                None if line == format!("```{language}") => block = Some(String::new()),
                // Of another language: its text is no example.
                None => block = None,
            }
        } else if let Some(text) = &mut block {
            text.push_str(line);
            text.push('\n');
        }
    }
    found
}

/// The rules of one command line, which must quote what a shell would take for itself.
fn rules_of(command: &str) -> Vec<String> {
    let words = command.split(' ').skip(2).filter(|word| word.contains("://"));
    words
        .map(|word| match word.strip_prefix('\'').and_then(|word| word.strip_suffix('\'')) {
            Some(quoted) => quoted.to_owned(),
            None => {
                assert!(!word.contains(['?', '&', '[', '*', '\'']), "a shell changes {word}");
                word.to_owned()
            }
        })
        .collect()
}

#[test]
fn every_file_in_the_page_is_a_configuration() {
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
fn every_command_in_the_page_has_rules() {
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

/// The right column of the table about socat.
#[test]
fn every_rule_in_place_of_socat_is_one() {
    let (_, table) = PAGE.split_once("## From socat").expect("the section");
    let rows: Vec<&str> = table.lines().filter(|line| line.contains("://")).collect();
    assert!(rows.len() >= 7, "{rows:?}");
    for row in rows {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().expect("a cell");
        argument(cell.trim_matches('`'));
    }
}

/// A histogram has series of three names, and one of its own in a page.
fn of_histogram(sample: &str) -> &str {
    let suffixes = ["_seconds_bucket", "_seconds_sum", "_seconds_count"];
    let found = suffixes.iter().find(|suffix| sample.ends_with(**suffix));
    found.map_or(sample, |suffix| &sample[..sample.len() - suffix.len() + "_seconds".len()])
}

#[test]
fn the_page_and_the_metrics_name_each_other() {
    let target = turnpike_forward::TargetSnapshot {
        target: super::ip("10.0.0.2", 80),
        address: std::net::SocketAddr::from(([10, 0, 0, 2], 80)).into(),
        up: true,
        counts: turnpike_forward::Tally::default(),
    };
    let rule = turnpike_forward::RuleSnapshot { targets: vec![target], ..Default::default() };
    let page = super::super::metrics::page(
        move || vec![(turnpike_forward::RuleId("r".to_owned()), rule.clone())],
        std::sync::Arc::default(),
        std::sync::Arc::default(),
    );
    let text = page().expect("encodes");
    let samples: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .map(of_histogram)
        .collect();
    let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let named: Vec<&str> = PAGE.split(word).filter(|word| word.starts_with("turnpike_")).collect();
    for sample in &samples {
        assert!(named.contains(sample), "docs/forward.md does not say what {sample} is");
    }
    for name in &named {
        assert!(samples.contains(name), "docs/forward.md names {name}, which is no metric");
    }
    // Reasons are in the page as well.
    let ended = text.lines().filter(|line| line.starts_with("turnpike_forward_ended_total{"));
    for reason in ended.filter_map(|line| line.split("reason=\"").nth(1)?.split('"').next()) {
        assert!(PAGE.contains(&format!("`{reason}`")), "docs/forward.md does not say what ends as {reason}");
    }
}
