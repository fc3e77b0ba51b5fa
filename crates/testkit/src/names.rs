//! Usernames that may confuse programs or readers.

/// Names, and how they appear in log lines, tables and pages. Servers accept all of them except the one that is not valid UTF-8.
pub const CORPUS: &[(&str, &str)] = &[
    ("alice", "alice"),
    ("müller 李 مها", "müller 李 مها"),
    ("f\0nul", "f\\0nul"),
    ("f\\0nul", "f\\\\0nul"),
    ("two\nlines", "two\\nlines"),
    ("a\r\tb", "a\\r\\tb"),
    ("\u{1b}[31mred\u{9b}0m\u{7f}", "\\u{1b}[31mred\\u{9b}0m\\u{7f}"),
    ("abc\u{202e}fed", "abc\\u{202e}fed"),
    ("\u{2066}isolated\u{2069}", "\\u{2066}isolated\\u{2069}"),
    ("line\u{2028}paragraph\u{2029}", "line\\u{2028}paragraph\\u{2029}"),
    ("ze\u{200b}ro\u{200d}\u{feff}", "ze\\u{200b}ro\\u{200d}\\u{feff}"),
    ("e\u{301}\u{fe0f}", "e\\u{301}\\u{fe0f}"),
    ("no-break\u{a0}soft\u{ad}tag\u{e0041}", "no-break\\u{a0}soft\\u{ad}tag\\u{e0041}"),
    ("filler\u{3164}\u{2800}", "filler\\u{3164}\\u{2800}"),
    ("\\", "\\\\"),
    ("C:\\users\\n", "C:\\\\users\\\\n"),
    ("\"quoted\", 'too'", "\\\"quoted\\\", 'too'"),
    ("a,b;c", "a,b;c"),
    ("=cmd()", "=cmd()"),
    ("<b>&amp;</b>", "<b>&amp;</b>"),
    (" two  spaces ", "\\u{20}two \\u{20}spaces\\u{20}"),
    ("cut…", "cut\\u{2026}"),
    (LONG, LONG),
];

/// Maximum length of a username: 508 bytes.
pub const LONG: &str = {
    const BYTES: [u8; 508] = [b'x'; 508];
    match str::from_utf8(&BYTES) {
        Ok(text) => text,
        Err(_) => unreachable!(),
    }
};
