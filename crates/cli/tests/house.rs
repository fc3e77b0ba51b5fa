//! Forbidden dependencies between crates (ARCHITECTURE.md), checked with `cargo metadata` and the sources. Every rule is a
//! function, and the second half of this file checks with modified input that each rule can fail.

use std::{fs, path::Path, path::PathBuf, process::Command};

use serde_json::{Value, json};

/// Layers. A crate imports only crates from lower layers.
const LAYERS: &[(&str, u8)] = &[
    ("turnpike-wire", 0),
    ("turnpike-net", 0),
    ("turnpike-measure", 0),
    ("turnpike-strict", 0),
    ("turnpike-rates", 0),
    ("turnpike-tls", 0),
    ("turnpike-testkit", 0),
    ("turnpike-trials", 1),
    ("turnpike-turn", 1),
    ("turnpike-client", 1),
    ("turnpike-offload", 1),
    ("turnpike-rules", 1),
    ("turnpike-copy", 1),
    ("turnpike-worker", 1),
    ("turnpike-convert", 2),
    ("turnpike-fleet", 2),
    ("turnpike-relay", 2),
    ("turnpike-forward", 2),
    ("turnpike-load", 2),
    ("turnpike-events", 2),
    ("turnpike-telemetry", 2),
    ("turnpike-api", 3),
    ("turnpike-config", 3),
    ("turnpike-stores", 3),
    ("turnpike-probe", 3),
    ("turnpike-acme", 4),
    ("turnpike-admin", 4),
    ("turnpike-process", 4),
    ("turnpike-lab", 4),
    ("turnpike-ctl", 5),
    ("turnpike-serve", 5),
    ("turnpike-forwarder", 5),
    ("turnpike-cli", 6),
    // Development tools: may import any crate, and no crate imports them.
    ("turnpike-benches", 6),
    ("turnpike-interleave", 6),
    ("xtask", 6),
];

/// Crates with system calls.
const MAY_BE_UNSAFE: &[&str] = &["turnpike-net", "turnpike-offload"];

/// Number of `unsafe` blocks by file; an increase must be approved here. Each has a SAFETY comment.
const UNSAFE: &[(&str, usize)] = &[
    ("net/src/error_queue.rs", 1),
    ("net/src/passed.rs", 1),
    ("net/src/poll.rs", 2),
    ("net/src/rx.rs", 3),
    ("net/src/send.rs", 3),
    ("net/src/send/tests.rs", 3),
    ("net/src/sys.rs", 6),
    ("net/src/system_calls.rs", 1),
    ("net/src/tcp.rs", 1),
    ("offload/src/layout.rs", 3),
    ("offload/src/links.rs", 3),
    ("offload/src/mapped_array.rs", 5),
];

/// Crates for sockets, runtimes, threads or clocks, forbidden in `turn`, which gets bytes and time as arguments.
const IO_CRATES: &[&str] = &[
    "async-io",
    "async-std",
    "chrono",
    "crossbeam",
    "libc",
    "mio",
    "nix",
    "polling",
    "quanta",
    "quinn-udp",
    "rayon",
    "rustix",
    "smol",
    "socket2",
    "time",
    "tokio",
    "turnpike-net",
];

const IO_NAMES: &[&str] =
    &["UdpSocket", "TcpStream", "TcpListener", "Instant", "SystemTime", "thread", "fs", "File"];

/// Sources of randomness, forbidden in `turn`, which gets a seed as an argument. Seeds of hash tables are allowed, because they affect no
/// visible result.
const RANDOM_CRATES: &[&str] = &["fastrand", "getrandom", "oorandom", "rand"];
const RANDOM_NAMES: &[&str] =
    &["rand", "getrandom", "OsRng", "ThreadRng", "thread_rng", "from_os_rng", "from_entropy"];

/// HTTP servers, forbidden in `api`, which only describes the interface.
const SERVING_CRATES: &[&str] = &["axum", "hyper", "hyper-util", "http-body-util", "tokio"];

/// Independent STUN implementations, for comparison with `turnpike-wire`.
const ORACLE: &[&str] = &["stun-types", "turn-types"];

/// TLS, HTTP and server runtimes, forbidden for configuration parsers.
const RUNNING_CRATES: &[&str] = &[
    "axum",
    "dimpl",
    "hyper",
    "rustls",
    "tokio",
    "tracing-subscriber",
    "turnpike-client",
    "turnpike-forward",
    "turnpike-relay",
];

/// Programs that `lab` measures; it starts them but never links them.
const SERVERS: &[&str] = &[
    "turnpike-relay",
    "turnpike-forward",
    "turnpike-load",
    "turnpike-probe",
    "turnpike-process",
    "turnpike-serve",
    "turnpike-forwarder",
    "turnpike-admin",
];

/// TURN and forwarder crates, forbidden in `process`.
const WORK: &[&str] = &[
    "turnpike-turn",
    "turnpike-relay",
    "turnpike-forward",
    "turnpike-fleet",
    "turnpike-stores",
    "turnpike-client",
];

#[test]
fn rules_name_existing_crates() {
    let names: Vec<String> = house().into_iter().map(|room| room.name).collect();
    for room in [
        "turnpike-wire",
        "turnpike-net",
        "turnpike-turn",
        "turnpike-relay",
        "turnpike-serve",
        "turnpike-forwarder",
        "turnpike-cli",
    ] {
        assert!(names.iter().any(|name| name == room), "{room} is not in {names:?}");
    }
}

#[test]
fn crates_import_only_lower_layers() {
    assert_eq!(upward_imports(&house()), NONE);
}

#[test]
fn turn_uses_no_socket_clock_thread_or_file() {
    let house = house();
    assert_eq!(io_crates_in_turn(&house), NONE);
    let turn = house.iter().find(|room| room.name == "turnpike-turn").expect("turn is a crate");
    let sources = sources(&turn.dir.join("src"));
    assert!(!sources.is_empty());
    assert_eq!(tokens_in(&sources, IO_NAMES), NONE);
}

#[test]
fn api_uses_neither_http_nor_tokio() {
    assert_eq!(forbidden_imports(&house(), "turnpike-api", SERVING_CRATES), NONE);
}

#[test]
fn config_links_no_tls_and_no_runtime() {
    for name in ["turnpike-config", "turnpike-convert"] {
        assert_eq!(forbidden_imports(&house(), name, RUNNING_CRATES), NONE);
    }
}

#[test]
fn turn_and_fleet_use_only_injected_randomness() {
    let house = house();
    for name in ["turnpike-turn", "turnpike-fleet"] {
        assert_eq!(forbidden_imports(&house, name, RANDOM_CRATES), NONE);
        let room = house.iter().find(|room| room.name == name).expect("a room");
        assert_eq!(tokens_in(&sources(&room.dir.join("src")), RANDOM_NAMES), NONE);
    }
}

#[test]
fn fleet_uses_no_socket_clock_thread_or_file() {
    let house = house();
    assert_eq!(forbidden_imports(&house, "turnpike-fleet", IO_CRATES), NONE);
    let fleet = house.iter().find(|room| room.name == "turnpike-fleet").expect("fleet is a crate");
    assert_eq!(tokens_in(&sources(&fleet.dir.join("src")), IO_NAMES), NONE);
}

#[test]
fn codec_oracle_is_only_in_tests() {
    let house = house();
    for room in &house {
        assert_eq!(forbidden_imports(&house, &room.name, ORACLE), NONE);
    }
}

#[test]
fn lab_links_no_server() {
    assert_eq!(servers_in_lab(&house()), NONE);
}

#[test]
fn process_imports_no_turn_and_no_forwarder_crate() {
    assert_eq!(forbidden_imports(&house(), "turnpike-process", WORK), NONE);
}

#[test]
fn unsafe_code_is_only_in_crates_with_system_calls() {
    for room in house().iter().filter(|room| !MAY_BE_UNSAFE.contains(&room.name.as_str())) {
        let sources = sources(&room.dir);
        assert!(!sources.is_empty(), "{} has no sources", room.name);
        assert_eq!(tokens_in(&sources, &["unsafe"]), NONE);
    }
}

#[test]
fn unsafe_blocks_are_counted_and_have_safety_comments() {
    let mut found = Vec::new();
    for room in house().iter().filter(|room| MAY_BE_UNSAFE.contains(&room.name.as_str())) {
        let crates = room.dir.parent().expect("crates are in one directory");
        for (path, text) in sources(&room.dir.join("src")) {
            assert_eq!(unargued(&text), Vec::<usize>::new(), "{}: no SAFETY comment above", path.display());
            let count = tokens_in(&[(path.clone(), text)], &["unsafe"]).len();
            let name = path.strip_prefix(crates).expect("the file is in the crate").display().to_string();
            found.extend((count > 0).then_some((name, count)));
        }
    }
    found.sort();
    let counted: Vec<(String, usize)> =
        UNSAFE.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
    assert_eq!(found, counted);
}

#[test]
fn every_other_crate_forbids_unsafe_code() {
    for room in house().iter().filter(|room| !MAY_BE_UNSAFE.contains(&room.name.as_str())) {
        assert!(!room.roots.is_empty(), "{} has no root", room.name);
        for root in &room.roots {
            let text = fs::read_to_string(root).expect("cargo names an existing file");
            assert!(forbids_unsafe(&text), "{} lacks #![forbid(unsafe_code)]", root.display());
        }
    }
}

#[test]
fn every_test_file_is_a_module() {
    for room in house() {
        let tests = room.dir.join("tests");
        let Ok(main) = fs::read_to_string(tests.join("main.rs")) else { continue };
        let files = fs::read_dir(&tests).expect("main.rs exists").flatten().map(|entry| entry.path());
        let stems = files.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
        let stems: Vec<_> = stems.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
        assert_eq!(forgotten_tests(&main, &stems), NONE, "in {}", tests.display());
    }
}

#[test]
fn documents_name_files_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = files_below(&root);
    for document in ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/dev/internals.md"] {
        let text = fs::read_to_string(root.join(document)).expect("documents are UTF-8");
        assert_eq!(missing_files(&text, &files), NONE, "in {document}");
    }
}

// Tests of the rules.

#[test]
fn missing_test_module_is_found() {
    let stems = ["main", "one", "two"].map(str::to_owned);
    assert_eq!(forgotten_tests("mod one;\nmod two;\n", &stems), NONE);
    assert_eq!(forgotten_tests("mod one;\n// mod two;\n", &stems), ["two"]);
}

#[test]
fn missing_file_in_a_document_is_found() {
    let files = ["/a/src/one.rs", "/a/justfile"].map(PathBuf::from);
    assert_eq!(missing_files("`one.rs`, `src/one.rs`, `cargo run x.rs`, `*.rs`, `NAME.rs`", &files), NONE);
    assert_eq!(missing_files("`ne.rs` and `src/two.rs`", &files), ["ne.rs", "src/two.rs"]);
}

/// A crate with one import; `dev` and `build` are dependency kinds in cargo.
#[test]
fn forbidden_imports_are_found() {
    type Rule = fn(&[Room]) -> Vec<String>;
    let randomness: Rule = |house| forbidden_imports(house, "turnpike-turn", RANDOM_CRATES);
    for (rule, room, import, kind, found) in [
        (
            upward_imports as Rule,
            "turnpike-relay",
            "turnpike-serve",
            None,
            "(layer 2) imports turnpike-serve (layer 5)",
        ),
        (
            upward_imports,
            "turnpike-turn",
            "turnpike-relay",
            Some("build"),
            "(layer 1) imports turnpike-relay (layer 2)",
        ),
        (upward_imports, "turnpike-net", "turnpike-wire", None, "(layer 0) imports turnpike-wire (layer 0)"),
        (upward_imports, "turnpike-attic", "serde", None, "has no layer"),
        (
            upward_imports,
            "turnpike-relay",
            "turnpike-attic",
            None,
            "imports turnpike-attic, which has no layer",
        ),
        (upward_imports, "turnpike-relay", "turnpike-turn", None, ""),
        (upward_imports, "turnpike-turn", "turnpike-relay", Some("dev"), ""),
        (io_crates_in_turn, "turnpike-turn", "socket2", None, "imports socket2"),
        (io_crates_in_turn, "turnpike-relay", "socket2", None, ""),
        (randomness, "turnpike-turn", "rand", None, "imports rand"),
        (servers_in_lab, "turnpike-lab", "turnpike-relay", None, "imports turnpike-relay"),
    ] {
        let told = rule(&read(&doctored(room, import, json!(kind))));
        let expected = if found.is_empty() { vec![] } else { vec![format!("{room} {found}")] };
        assert_eq!(told, expected, "{room} and {import}");
    }
    let draw = (PathBuf::from("a.rs"), "let key: u64 = rand::random();".to_owned());
    assert_eq!(tokens_in(&[draw], RANDOM_NAMES), ["a.rs:1: rand"]);
}

#[test]
fn tokens_are_found_only_in_code_and_as_whole_words() {
    let find = |code: &str| tokens_in(&[(PathBuf::from("a.rs"), code.to_owned())], &["unsafe"]);
    for code in [
        "\nfn f() { unsafe { g() } }",
        "\n/* one /* two */ still */ unsafe fn f() {}",
        "\nlet quote = '\"'; unsafe {}",
        "\nfn f<'a>(x: &'a str) { unsafe {} }",
        "\nlet r = r#\"a \" b\"#; unsafe {}",
    ] {
        assert_eq!(find(code), ["a.rs:2: unsafe"], "{code}");
    }
    for harmless in [
        "// unsafe",
        "/* unsafe */",
        "/* one /* two */ unsafe */",
        "\"unsafe\"",
        "\"a \\\" unsafe\"",
        "r#\"a \" unsafe\"#",
        "b\"unsafe\"",
        "#![forbid(unsafe_code)]",
        "not_unsafe()",
    ] {
        assert_eq!(find(harmless), NONE, "{harmless}");
    }
}

#[test]
fn unsafe_without_a_safety_comment_is_found() {
    for argued in [
        "// SAFETY: it is so.\nlet a = unsafe { b() };",
        "// SAFETY: it is so,\n// and so.\nmatch c(\n    unsafe { b() },\n) {}",
        "/// Does.\n///\n/// # Safety\n/// Only if.\npub unsafe fn f() {}",
        "// SAFETY: both are.\nlet (a, b) = (unsafe { f() }, unsafe { g() });",
    ] {
        assert_eq!(unargued(argued), Vec::<usize>::new(), "{argued}");
    }
    assert_eq!(unargued("let a = unsafe { b() };"), [1]);
    assert_eq!(unargued("// SAFETY: it is so.\nlet a = unsafe { b() };\nlet c = unsafe { b() };"), [3]);
    assert_eq!(unargued("/// Does.\npub unsafe fn f() {}"), [2]);
}

#[test]
fn missing_forbid_attribute_is_found() {
    assert!(forbids_unsafe("//! Docs.\n#![forbid(unsafe_code)]\nfn main() {}"));
    assert!(!forbids_unsafe("fn main() {}"));
    assert!(!forbids_unsafe("// #![forbid(unsafe_code)]\nfn main() {}"));
    assert!(!forbids_unsafe("#![deny(unsafe_code)]"));
}

const NONE: &[String] = &[];

struct Room {
    name: String,
    /// Normal and build dependencies, without dev-dependencies.
    imports: Vec<String>,
    /// `lib.rs` and `main.rs`, which contain the crate attributes.
    roots: Vec<PathBuf>,
    dir: PathBuf,
}

fn house() -> Vec<Room> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    read(&serde_json::from_slice(&output.stdout).expect("cargo writes JSON"))
}

fn read(metadata: &Value) -> Vec<Room> {
    let list = |value: &Value| value.as_array().expect("an array").clone();
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    list(&metadata["packages"])
        .iter()
        .map(|package| Room {
            name: text(&package["name"]),
            imports: list(&package["dependencies"])
                .iter()
                .filter(|dependency| dependency["kind"] != "dev")
                .map(|dependency| text(&dependency["name"]))
                .collect(),
            roots: list(&package["targets"])
                .iter()
                .filter(|target| {
                    let roots = ["lib", "bin", "example"];
                    list(&target["kind"]).iter().any(|kind| roots.iter().any(|root| kind == root))
                })
                .map(|target| PathBuf::from(text(&target["src_path"])))
                .collect(),
            dir: Path::new(&text(&package["manifest_path"])).parent().expect("in a directory").to_owned(),
        })
        .collect()
}

fn doctored(name: &str, import: &str, kind: Value) -> Value {
    let dependency = json!({ "name": import, "kind": kind });
    json!({ "packages": [
        { "name": name, "manifest_path": "/house/Cargo.toml", "targets": [], "dependencies": [dependency] },
    ] })
}

fn layer(name: &str) -> Option<u8> {
    LAYERS.iter().find(|(room, _)| *room == name).map(|(_, layer)| *layer)
}

fn upward_imports(house: &[Room]) -> Vec<String> {
    let mut found = Vec::new();
    for room in house {
        let Some(here) = layer(&room.name) else {
            found.push(format!("{} has no layer", room.name));
            continue;
        };
        for import in
            room.imports.iter().filter(|import| import.starts_with("turnpike") || *import == "xtask")
        {
            match layer(import) {
                Some(there) if there < here => {}
                Some(there) => {
                    found.push(format!("{} (layer {here}) imports {import} (layer {there})", room.name));
                }
                None => found.push(format!("{} imports {import}, which has no layer", room.name)),
            }
        }
    }
    found
}

fn io_crates_in_turn(house: &[Room]) -> Vec<String> {
    forbidden_imports(house, "turnpike-turn", IO_CRATES)
}

fn servers_in_lab(house: &[Room]) -> Vec<String> {
    forbidden_imports(house, "turnpike-lab", SERVERS)
}

fn forbidden_imports(house: &[Room], name: &str, forbidden: &[&str]) -> Vec<String> {
    house
        .iter()
        .filter(|room| room.name == name)
        .flat_map(|room| &room.imports)
        .filter(|import| forbidden.contains(&import.as_str()))
        .map(|import| format!("{name} imports {import}"))
        .collect()
}

/// Test files of a crate that are not modules of its `tests/main.rs` and so would never run.
fn forgotten_tests(main: &str, stems: &[String]) -> Vec<String> {
    let code = code_of(main);
    let has = |stem: &String| code.lines().any(|line| line.trim() == format!("mod {stem};"));
    stems.iter().filter(|stem| *stem != "main" && !has(stem)).cloned().collect()
}

/// Lines with `unsafe` whose statement or documentation has no SAFETY comment.
fn unargued(source: &str) -> Vec<usize> {
    let lines: Vec<&str> = source.lines().collect();
    let code = code_of(source);
    let has_unsafe =
        |line: &str| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
    let is_comment = |line: &str| line.trim_start().starts_with("//");
    let mut found = Vec::new();
    for (index, _) in code.lines().enumerate().filter(|(_, line)| has_unsafe(line)) {
        let mut above = lines[..index].iter().rev();
        // Goes back to the start of the statement, then through the comment above it.
        let begins = above
            .clone()
            .take_while(|line| !is_comment(line) && !line.trim_end().ends_with([';', '{', '}']))
            .count();
        let mut comment = above
            .by_ref()
            .skip(begins)
            .take_while(|line| is_comment(line) || line.trim_start().starts_with("#["));
        if !comment.any(|line| line.contains("SAFETY: ") || line.contains("# Safety")) {
            found.push(index + 1);
        }
    }
    found
}

fn forbids_unsafe(root: &str) -> bool {
    code_of(root).split_whitespace().collect::<String>().contains("#![forbid(unsafe_code)]")
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("a directory of the workspace can be read") {
        let path = entry.expect("entries are readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !path.is_dir() {
            found.push(path);
        } else if name != "target" && !name.starts_with('.') {
            found.extend(files_below(&path));
        }
    }
    found
}

fn missing_files(document: &str, files: &[PathBuf]) -> Vec<String> {
    let is_named = |text: &str| {
        let endings = [".rs", ".md", ".toml", ".sh", ".tsv", ".py", ".c"];
        let is_path = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
        let is_pattern = text.contains("NAME") || !text.chars().all(is_path);
        !is_pattern && endings.iter().any(|ending| text.ends_with(ending))
    };
    let named = document.split('`').skip(1).step_by(2).filter(|text| is_named(text));
    named.filter(|name| !files.iter().any(|path| path.ends_with(name))).map(str::to_owned).collect()
}

fn sources(dir: &Path) -> Vec<(PathBuf, String)> {
    let files = files_below(dir).into_iter();
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    files.map(|path| (path.clone(), fs::read_to_string(path).expect("sources are UTF-8"))).collect()
}

/// `file:line: token` for each of `tokens` in code, as a whole word.
fn tokens_in(sources: &[(PathBuf, String)], tokens: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in sources {
        for (index, line) in code_of(text).lines().enumerate() {
            for word in line.split(|c: char| !c.is_alphanumeric() && c != '_') {
                if tokens.contains(&word) {
                    found.push(format!("{}:{}: {word}", path.display(), index + 1));
                }
            }
        }
    }
    found
}

/// Rust source without comments and contents of literals, line by line.
fn code_of(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut code = String::with_capacity(source.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &source[at..];
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if let Some(len) = raw_string(rest, &code) {
            len
        } else if rest.starts_with('"') {
            quoted(rest, b'"')
        } else if rest.starts_with('\'') && is_char_literal(rest) {
            quoted(rest, b'\'')
        } else {
            0
        };
        if skipped == 0 {
            let c = rest.chars().next().expect("at is before the end");
            code.push(c);
            at += c.len_utf8();
        } else {
            code.push(' ');
            code.extend(rest[..skipped].matches('\n'));
            at += skipped;
        }
    }
    code
}

/// Length of the block comment at the start of `rest`; block comments nest.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// Length of the raw string at the start of `rest`, unless its `r` ends a longer name in `before`.
fn raw_string(rest: &str, before: &str) -> Option<usize> {
    let after = rest.strip_prefix('r')?;
    if before.ends_with(|c: char| c.is_alphanumeric() && c != 'b' && c != 'c' || c == '_') {
        return None;
    }
    let hashes = after.len() - after.trim_start_matches('#').len();
    let text = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(1 + hashes + 1 + text.find(&end)? + end.len())
}

/// Length of the quoted literal at the start of `rest`.
fn quoted(rest: &str, quote: u8) -> usize {
    let mut escaped = false;
    for (index, byte) in rest.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            _ if byte == quote => return index + 1,
            _ => {}
        }
    }
    rest.len()
}

/// True for `'a'` and `'\n'`, false for the lifetime `'a`.
fn is_char_literal(rest: &str) -> bool {
    let mut chars = rest.chars().skip(1);
    chars.next() == Some('\\') || chars.next() == Some('\'')
}
