//! The phrases, and the search for them in a text.

use std::fmt;

/// Words with which no comment may start; it starts with a noun or a verb instead.
const STARTS: &[&str] = &[
    "What", "Whether", "Who", "Whom", "Whose", "Where", "Which", "Why", "How", "Of", "By", "From", "With",
    "In", "At", "As", "So many", "The same",
];
const NAME_STARTS: &[&str] = &["what", "whether", "which", "why", "how", "of", "the same"];
const NAME_WORDS: &[&str] = &["who", "whose"];
const NAME_LENGTH: usize = 70;
/// A clause used as a noun: a word from the first list, followed by a word from the second.
const FREE: [&[&str]; 2] = [
    &["what", "whoever", "who", "whom"],
    &[
        "is", "was", "has", "a", "the", "it", "they", "comes", "came", "stands", "asks", "waits", "each",
        "other", "others", "one", "of", "we",
    ],
];
const PERSONS: &[&str] =
    &["nobody", "somebody", "anybody", "whoever", "whom", "likewise", "anew", "lest", "thereof"];
const SPEECH: &[&str] = &["told", "says", "said", "tells"];

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// Line number, counted from 1.
    pub(super) line: usize,
    pub(super) phrase: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.line, self.phrase)
    }
}

/// Consecutive lines of prose with their numbers.
pub(super) type Block<'a> = [(usize, &'a str)];

/// Finds phrases anywhere in the block.
pub(super) fn in_text(block: &Block<'_>) -> Vec<Finding> {
    let words: Vec<(usize, &str)> = block
        .iter()
        .flat_map(|(line, text)| text.split_whitespace().map(move |word| (*line, word)))
        .collect();
    let mut found = Vec::new();
    for (at, (line, word)) in words.iter().enumerate() {
        let mut add = |phrase: String| found.push(Finding { line: *line, phrase });
        for part in word.split(|c: char| !is_word(c)) {
            if PERSONS.contains(&part.to_lowercase().as_str()) || SPEECH.contains(&part) {
                add(part.to_owned());
            }
        }
        let begins_sentence = at > 0 && words[at - 1].1.ends_with(['.', '?']);
        let first = word.rsplit(|c: char| !is_word(c)).next().unwrap_or_default();
        let Some((_, next)) = words.get(at + 1) else { continue };
        let second = next.split(|c: char| !is_word(c)).next().unwrap_or_default();
        if FREE[0].contains(&first) && FREE[1].contains(&second) && !begins_sentence {
            add(format!("{first} {second}"));
        }
    }
    found
}

/// Finds phrases anywhere in a comment, and a first word that is neither a noun nor a verb.
pub(super) fn in_comment(block: &Block<'_>) -> Vec<Finding> {
    let mut found = in_text(block);
    let Some((line, text)) = block.iter().find(|(_, text)| !text.trim().is_empty()) else { return found };
    if let Some(start) = STARTS.iter().find(|start| starts_with_words(text.trim(), start)) {
        found.insert(0, Finding { line: *line, phrase: format!("{start} …") });
    }
    found
}

/// Objection to the name of a test, or `None`.
pub(super) fn in_test_name(line: usize, name: &str) -> Option<Finding> {
    let words = name.replace('_', " ");
    let is_long = name.chars().count() > NAME_LENGTH;
    let is_odd = NAME_STARTS.iter().any(|start| starts_with_words(&words, start))
        || words.split(' ').any(|word| NAME_WORDS.contains(&word))
        || !in_text(&[(line, &words)]).is_empty();
    let why = if is_odd { "not plain" } else { "longer than 70 characters" };
    (is_long || is_odd).then(|| Finding { line, phrase: format!("{why}: {name}") })
}

fn starts_with_words(text: &str, start: &str) -> bool {
    text.strip_prefix(start).is_some_and(|rest| !rest.starts_with(is_word))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phrases(found: Vec<Finding>) -> Vec<String> {
        found.into_iter().map(|finding| finding.phrase).collect()
    }

    #[test]
    fn phrases_are_found_as_whole_words() {
        let text = |text| phrases(in_text(&[(1, text)]));
        for (given, expected) in [
            ("Tells who comes, and is told", &["who comes", "told"][..]),
            ("what others (what a node) do", &["what others", "what a"]),
            ("Nobody says so.", &["Nobody", "says"]),
            ("Done. what is this? what a", &[]),
            ("somewhat is, what isn't, unsaid, retold", &[]),
            ("the whom-list · what·", &["whom"]),
        ] {
            assert_eq!(text(given), expected, "{given}");
        }
    }

    #[test]
    fn a_phrase_may_continue_on_the_next_line() {
        let found = in_text(&[(4, "an address for who"), (5, "comes first")]);
        assert_eq!(found, [Finding { line: 4, phrase: "who comes".to_owned() }]);
    }

    #[test]
    fn comments_start_with_a_noun_or_a_verb() {
        let comment = |text| phrases(in_comment(&[(1, ""), (2, text)]));
        assert_eq!(comment("Of one worker"), ["Of …"]);
        assert_eq!(comment("The same in total"), ["The same …"]);
        for plain in ["Office hours", "The sample", "Offset in bytes, of the header", "Interval"] {
            assert!(comment(plain).is_empty(), "{plain}");
        }
    }

    #[test]
    fn test_names_are_short_and_plain() {
        let is_plain = |name: &str| in_test_name(1, name).is_none();
        assert!(is_plain("refresh_with_zero_lifetime_frees_the_port"));
        assert!(is_plain("office_closes_at_the_limit"));
        for odd in
            ["of_two_the_first_wins", "client_who_left_is_gone", "a_peer_is_told", "what_is_sent_arrives"]
        {
            assert!(!is_plain(odd), "{odd}");
        }
        assert!(is_plain(&"a".repeat(70)) && !is_plain(&"a".repeat(71)));
    }
}
