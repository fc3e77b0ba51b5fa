//! `cargo xtask links`: checks links between documents, and mentions of documents in other files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Component, Path, PathBuf},
    process::ExitCode,
};

use crate::{
    Failure,
    prose::{outside_code_blocks, tracked_files},
    repository,
};

/// This file is not checked, because its tests contain links.
const EXAMPLES: &str = "xtask/src/links.rs";

type Documents = BTreeMap<String, String>;

pub(crate) fn run() -> Result<ExitCode, Failure> {
    let root = repository()?;
    let files = tracked_files(&root)?;
    let files: Vec<_> = files.into_iter().filter(|path| root.join(path).is_file()).collect();
    let texts =
        files.iter().filter_map(|path| Some((path.clone(), fs::read_to_string(root.join(path)).ok()?)));
    let (documents, others): (Documents, Documents) = texts.partition(|(path, _)| path.ends_with(".md"));
    let exists = |path: &str| root.join(path).exists();
    let mut broken = Vec::new();
    for (path, text) in &documents {
        broken.extend(broken_links(path, text, &documents, exists));
    }
    for (path, text) in others.iter().filter(|(path, _)| *path != EXAMPLES) {
        broken.extend(broken_mentions(path, text, &documents));
    }
    broken.iter().for_each(|link| println!("{link}"));
    println!("documents: {}, broken links: {}", documents.len(), broken.len());
    Ok(if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Relative links in a document that lead to a missing target.
fn broken_links(path: &str, text: &str, documents: &Documents, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let directory = Path::new(path).parent().unwrap_or(Path::new(""));
    let mut broken = Vec::new();
    for (number, line) in outside_code_blocks(text) {
        for (at, _) in line.match_indices("](") {
            let target = &line[at + 2..];
            let Some(target) = target.find(')').map(|end| &target[..end]) else { continue };
            if target.contains(char::is_whitespace)
                || ["http:", "https:", "mailto:"].iter().any(|it| target.starts_with(it))
            {
                continue;
            }
            let (file, anchor) = target.split_once('#').map_or((target, None), |(file, it)| (file, Some(it)));
            let file = if file.is_empty() { path.to_owned() } else { normal(&directory.join(file)) };
            if !exists(&file) {
                broken.push(format!("{path}:{number}: no file {target}"));
            } else if !has_anchor(documents, &file, anchor) {
                broken.push(format!("{path}:{number}: no heading {target}"));
            }
        }
    }
    broken
}

/// Mentions of documents, such as `docs/serve.md#limits`, that do not exist or lack the section.
fn broken_mentions(path: &str, text: &str, documents: &Documents) -> Vec<String> {
    let mut broken = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for (at, _) in line.match_indices("docs/") {
            if line[..at].ends_with(|c: char| c.is_alphanumeric() || "/._-".contains(c)) {
                continue;
            }
            let is_path = |c: char| c.is_ascii_alphanumeric() || "/_-.".contains(c);
            let rest = &line[at..];
            let end = rest.find(|c| !is_path(c)).unwrap_or(rest.len());
            let Some(end) = rest[..end].find(".md").map(|end| end + ".md".len()) else { continue };
            let file = &rest[..end];
            let anchor = rest[end..].strip_prefix('#').map(|rest| {
                &rest[..rest.find(|c: char| !c.is_alphanumeric() && !"_-".contains(c)).unwrap_or(rest.len())]
            });
            let anchor = anchor.filter(|anchor| !anchor.is_empty());
            if file.contains("NAME") || file.contains("PAGE") {
                continue;
            }
            if !documents.contains_key(file) {
                broken.push(format!("{path}:{}: no file {file}", number + 1));
            } else if !has_anchor(documents, file, anchor) {
                broken.push(format!("{path}:{}: no heading {file}#{}", number + 1, anchor.unwrap_or("")));
            }
        }
    }
    broken
}

fn has_anchor(documents: &Documents, file: &str, anchor: Option<&str>) -> bool {
    match (documents.get(file), anchor) {
        (Some(text), Some(anchor)) => anchors(text).contains(anchor),
        _ => true,
    }
}

/// Anchors of a document: those that GitHub generates from its headings, and those of `<a id="…">`.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut seen = BTreeMap::<String, usize>::new();
    for (_, line) in outside_code_blocks(text) {
        let heading = line.trim_start_matches('#');
        if let Some(heading) = heading.strip_prefix(' ').filter(|_| line.starts_with('#')) {
            let slug = slug(heading);
            let count = seen.entry(slug.clone()).or_default();
            anchors.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
            *count += 1;
        }
        for mark in ["<a id=\"", "<a name=\""] {
            let named = line.split(mark).skip(1).filter_map(|rest| rest.split_once('"'));
            anchors.extend(named.map(|(name, _)| name.to_owned()));
        }
    }
    anchors
}

fn slug(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    // Only the text of a link in a heading is part of the anchor.
    while let Some((before, link)) = rest.split_once('[') {
        text.push_str(before);
        let Some((words, after)) = link.split_once("](") else {
            rest = link;
            continue;
        };
        text.push_str(words);
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let kept = text.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || "_- ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn normal(path: &Path) -> String {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    parts.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents() -> Documents {
        let page =
            "# A page\n## `serve`: limits, again\n## Twice\n## Twice\n<a id=\"old\"></a>\n```\n# not\n```\n";
        [("docs/page.md", page), ("README.md", "")]
            .map(|(path, text)| (path.to_owned(), text.to_owned()))
            .into()
    }

    #[test]
    fn anchors_are_generated_as_on_github() {
        let text = &documents()["docs/page.md"];
        let expected = ["a-page", "old", "serve-limits-again", "twice", "twice-1"];
        assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), expected);
        assert_eq!(slug("[The page](a.md) of A/B"), "the-page-of-ab");
    }

    #[test]
    fn links_without_a_target_are_found() {
        let documents = documents();
        let broken =
            |text: &str| broken_links("docs/page.md", text, &documents, |path| documents.contains_key(path));
        let fine = "[a](../README.md) [b](#twice-1) [c](page.md#old) [d](https://a.example/) `[e](gone.md` \n```\n[f](gone.md)\n```";
        assert!(broken(fine).is_empty());
        let wrong = "\n[a](README.md), [b](#thrice) and\n[c](../docs/page.md#not)";
        let expected = [
            "docs/page.md:2: no file README.md",
            "docs/page.md:2: no heading #thrice",
            "docs/page.md:3: no heading ../docs/page.md#not",
        ];
        assert_eq!(broken(wrong), expected);
    }

    #[test]
    fn mentions_without_a_target_are_found() {
        let documents = documents();
        let broken = |text: &str| broken_mentions("a.rs", text, &documents);
        assert!(
            broken("see docs/page.md, docs/page.md#twice. other/docs/gone.md docs/*.md docs/NAME.md")
                .is_empty()
        );
        assert_eq!(
            broken("see docs/gone.md.\n(docs/page.md#thrice)"),
            ["a.rs:1: no file docs/gone.md", "a.rs:2: no heading docs/page.md#thrice"]
        );
    }
}
