//! `cargo xtask numbers`: measures the size and shape of the code, so that two commits can be compared.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use syn::{
    Attribute, ExprUnsafe, File, ImplItem, Item, ItemImpl, ItemMod, UseTree, Visibility,
    spanned::Spanned as _,
    visit::{self, Visit},
};

use crate::{Failure, cargo, repository};

/// Crates of the management plane, which surrounds the relay, the forwarder and the generator.
const MANAGEMENT: [&str; 12] = [
    "admin",
    "api",
    "cli",
    "client",
    "config",
    "convert",
    "ctl",
    "fleet",
    "forwarder",
    "process",
    "serve",
    "stores",
];
/// Crate with the tests that generate tables in the documentation.
const TRIALS: &str = "trials";
/// Crates that are linked only into tests.
const TESTS: [&str; 3] = ["interleave", "testkit", "trials"];

#[derive(Args)]
pub(crate) struct Options {
    /// List the type names that are defined more than once, and the files that import each other
    #[arg(long)]
    list: bool,
}

struct Source {
    krate: String,
    /// Module path within the crate, such as `["server", "auth"]`.
    module: Vec<String>,
    lines: usize,
    shape: Shape,
}

/// Contents of a file, excluding its tests.
#[derive(Default)]
struct Shape {
    test_lines: usize,
    /// Modules that have a file of their own and are compiled only for tests.
    test_modules: Vec<Vec<String>>,
    types: Vec<String>,
    public_items: usize,
    unsafe_blocks: usize,
    /// Imported paths, absolute within the crate.
    imports: BTreeSet<Vec<String>>,
    module: Vec<String>,
}

#[derive(Default)]
struct Numbers {
    sources: Vec<Source>,
    /// Lines of files in `tests` directories, except those of [`TRIALS`].
    test_lines: usize,
    trial_lines: usize,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let root = repository()?;
    let numbers = Numbers::of(&root.join("crates"))?;
    let types = numbers.types();
    let repeated: Vec<_> = types.iter().filter(|(_, at)| at.len() > 1).collect();
    let cycles = numbers.cycles();
    let linked = linked_by_config(&root)?;
    let rows = [
        ("source_lines", numbers.source_lines(|krate| !TESTS.contains(&krate))),
        ("test_lines", numbers.all_test_lines()),
        ("trial_lines", numbers.trial_lines),
        ("management_lines", numbers.source_lines(|krate| MANAGEMENT.contains(&krate))),
        ("types", types.len()),
        ("types_defined_more_than_once", repeated.len()),
        ("public_items_of_net", numbers.sum("net", |shape| shape.public_items)),
        ("circular_imports", cycles.len()),
        ("unsafe_blocks", numbers.sources.iter().map(|source| source.shape.unsafe_blocks).sum()),
        ("crates_linked_by_config", linked),
    ];
    println!("| number | value |\n| --- | ---: |");
    for (name, value) in rows {
        println!("| {} | {value} |", name.replace('_', " "));
    }
    if options.list {
        for (name, at) in repeated {
            println!("type {name}: {}", at.join(", "));
        }
        for (one, other) in cycles {
            println!("circular: {one} and {other}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Numbers {
    fn of(crates: &Path) -> Result<Self, Failure> {
        let mut numbers = Self::default();
        for krate in fs::read_dir(crates)? {
            let krate = krate?.path();
            let name = name_of(&krate);
            for file in rust_files(&krate.join("tests"))? {
                let lines = fs::read_to_string(file)?.lines().count();
                *(if name == TRIALS { &mut numbers.trial_lines } else { &mut numbers.test_lines }) += lines;
            }
            let src = krate.join("src");
            for file in rust_files(&src)? {
                let text = fs::read_to_string(&file)?;
                let module = module_of(file.strip_prefix(&src)?);
                let parsed = syn::parse_file(&text).map_err(|why| format!("{}: {why}", file.display()))?;
                let shape = Shape::of(&parsed, module.clone());
                numbers.sources.push(Source {
                    krate: name.clone(),
                    module,
                    lines: text.lines().count(),
                    shape,
                });
            }
        }
        numbers.set_test_files_apart();
        Ok(numbers)
    }

    /// Counts files that their parent module declares only for tests, and the files of their submodules, as test lines.
    fn set_test_files_apart(&mut self) {
        let modules: Vec<(String, Vec<String>)> = self
            .sources
            .iter()
            .flat_map(|source| {
                source.shape.test_modules.iter().map(|module| (source.krate.clone(), module.clone()))
            })
            .collect();
        let is_test = |source: &Source| {
            modules.iter().any(|(krate, module)| *krate == source.krate && source.module.starts_with(module))
        };
        self.test_lines +=
            self.sources.iter().filter(|source| is_test(source)).map(|source| source.lines).sum::<usize>();
        self.sources.retain(|source| !is_test(source));
    }

    fn source_lines(&self, counts: impl Fn(&str) -> bool) -> usize {
        let sources = self.sources.iter().filter(|source| counts(&source.krate));
        sources.map(|source| source.lines - source.shape.test_lines).sum()
    }

    fn all_test_lines(&self) -> usize {
        let inside = self.sources.iter().map(|source| source.shape.test_lines).sum::<usize>();
        self.test_lines + inside + self.source_lines(|krate| TESTS.contains(&krate))
    }

    fn sum(&self, krate: &str, of: impl Fn(&Shape) -> usize) -> usize {
        self.sources.iter().filter(|source| source.krate == krate).map(|source| of(&source.shape)).sum()
    }

    /// Maps each type name to the files that define it.
    fn types(&self) -> BTreeMap<&str, Vec<String>> {
        let mut types = BTreeMap::<&str, Vec<String>>::new();
        for source in self.sources.iter().filter(|source| !TESTS.contains(&source.krate.as_str())) {
            for name in &source.shape.types {
                types.entry(name).or_default().push(source.to_string());
            }
        }
        types
    }

    /// Pairs of files in one crate that import each other.
    fn cycles(&self) -> Vec<(String, String)> {
        let mut files = BTreeMap::<&str, BTreeMap<&[String], &Source>>::new();
        for source in &self.sources {
            files.entry(&source.krate).or_default().insert(&source.module, source);
        }
        let mut found = Vec::new();
        for files in files.values() {
            let imports = |source: &Source| -> BTreeSet<Vec<String>> {
                source.shape.imports.iter().filter_map(|path| file_of(files, path)).collect()
            };
            for (module, source) in files {
                for other in imports(source) {
                    if module.to_vec() < other && imports(files[other.as_slice()]).contains(*module) {
                        found.push((source.to_string(), files[other.as_slice()].to_string()));
                    }
                }
            }
        }
        found
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.krate)?;
        self.module.iter().try_for_each(|part| write!(f, "::{part}"))
    }
}

impl Shape {
    fn of(file: &File, module: Vec<String>) -> Self {
        let mut shape = Self { module, ..Self::default() };
        shape.visit_file(file);
        shape
    }

    fn import(&mut self, tree: &UseTree, mut path: Vec<String>) {
        match tree {
            UseTree::Path(part) => {
                path.push(part.ident.to_string());
                self.import(&part.tree, path);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, path.clone());
                }
            }
            UseTree::Name(name) => {
                path.push(name.ident.to_string());
                self.keep_import(&path);
            }
            UseTree::Rename(name) => {
                path.push(name.ident.to_string());
                self.keep_import(&path);
            }
            UseTree::Glob(_) => self.keep_import(&path),
        }
    }

    fn keep_import(&mut self, path: &[String]) {
        let mut parts = path.iter().peekable();
        let mut absolute = match parts.next().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self") => self.module.clone(),
            Some("super") => self.module[..self.module.len().saturating_sub(1)].to_vec(),
            _ => return,
        };
        while parts.next_if(|part| *part == "super").is_some() {
            absolute.pop();
        }
        absolute.extend(parts.cloned());
        self.imports.insert(absolute);
    }
}

impl<'a> Visit<'a> for Shape {
    fn visit_item(&mut self, item: &'a Item) {
        let (attributes, public) = match item {
            Item::Struct(item) => (&item.attrs, is_public(&item.vis)),
            Item::Enum(item) => (&item.attrs, is_public(&item.vis)),
            Item::Union(item) => (&item.attrs, is_public(&item.vis)),
            Item::Trait(item) => (&item.attrs, is_public(&item.vis)),
            Item::Type(item) => (&item.attrs, is_public(&item.vis)),
            Item::Fn(item) => (&item.attrs, is_public(&item.vis)),
            Item::Const(item) => (&item.attrs, is_public(&item.vis)),
            Item::Static(item) => (&item.attrs, is_public(&item.vis)),
            Item::Mod(item) => (&item.attrs, false),
            Item::Impl(item) => (&item.attrs, false),
            Item::Use(item) => (&item.attrs, false),
            _ => return visit::visit_item(self, item),
        };
        if is_for_tests(attributes) {
            let span = item.span();
            self.test_lines += span.end().line - span.start().line + 1;
            if let Item::Mod(ItemMod { ident, content: None, .. }) = item {
                self.test_modules.push(self.module.iter().cloned().chain([ident.to_string()]).collect());
            }
            return;
        }
        self.public_items += usize::from(public);
        let name = match item {
            Item::Struct(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            _ => None,
        };
        self.types.extend(name.map(ToString::to_string));
        if let Item::Use(item) = item {
            self.import(&item.tree, Vec::new());
        }
        visit::visit_item(self, item);
    }

    fn visit_item_impl(&mut self, item: &'a ItemImpl) {
        let public = item.items.iter().filter(|item| match item {
            ImplItem::Fn(item) => is_public(&item.vis),
            ImplItem::Const(item) => is_public(&item.vis),
            _ => false,
        });
        self.public_items += public.count();
        visit::visit_item_impl(self, item);
    }

    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        let inline = item.content.is_some();
        if inline {
            self.module.push(item.ident.to_string());
        }
        visit::visit_item_mod(self, item);
        if inline {
            self.module.pop();
        }
    }

    fn visit_expr_unsafe(&mut self, block: &'a ExprUnsafe) {
        self.unsafe_blocks += 1;
        visit::visit_expr_unsafe(self, block);
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// True for `#[cfg(test)]` and `#[cfg(all(test, …))]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| {
        attribute.meta.require_list().is_ok_and(|list| {
            let condition = list.tokens.to_string();
            condition == "test" || condition.starts_with("all (test") || condition.starts_with("all(test")
        })
    })
}

/// File that an import refers to: the one with the longest module path that is a prefix of the import.
fn file_of(files: &BTreeMap<&[String], &Source>, path: &[String]) -> Option<Vec<String>> {
    (0..=path.len())
        .rev()
        .map(|length| &path[..length])
        .find(|path| files.contains_key(*path))
        .map(<[String]>::to_vec)
}

/// Module path of a file below `src`.
fn module_of(path: &Path) -> Vec<String> {
    let mut module: Vec<String> =
        path.with_extension("").iter().map(|part| part.to_string_lossy().into()).collect();
    if module.last().is_some_and(|last| last == "mod") || module == ["lib"] || module == ["main"] {
        module.pop();
    }
    module
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into()
}

fn rust_files(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    if !directory.is_dir() {
        return Ok(Vec::new());
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

/// Number of crates that the configuration parser links, including itself.
fn linked_by_config(root: &Path) -> Result<usize, Failure> {
    let tree = cargo(root)
        .args(["tree", "--offline", "--package", "turnpike-config", "--edges", "normal", "--prefix", "none"])
        .args(["--format", "{p}"])
        .output()?;
    if !tree.status.success() {
        return Err(String::from_utf8_lossy(&tree.stderr).into_owned().into());
    }
    let names = String::from_utf8(tree.stdout)?;
    let names: BTreeSet<&str> = names.lines().filter_map(|line| line.split(" (").next()).collect();
    Ok(names.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "use crate::{a::B, c};
use super::d::E;
pub struct One(u8);
enum Two {}
impl One {
    pub const ZERO: u8 = 0;
    pub fn get(&self) -> u8 { unsafe { read() } }
    fn hidden(&self) {}
}
pub(crate) fn inner() {}
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests {
    use crate::f::G;
    struct Three;
    fn f() { unsafe { g() } }
}
";

    fn source(krate: &str, module: &[&str], text: &str) -> Source {
        let module: Vec<String> = module.iter().map(|part| (*part).to_owned()).collect();
        let file = syn::parse_file(text).expect("valid Rust");
        let shape = Shape::of(&file, module.clone());
        Source { krate: krate.into(), module, lines: text.lines().count(), shape }
    }

    #[test]
    fn code_in_tests_is_not_counted_as_source() {
        let Source { shape, lines, .. } = source("net", &["x", "y"], FILE);
        assert_eq!((lines, shape.test_lines), (18, 8));
        assert_eq!(shape.types, ["One", "Two"]);
        assert_eq!((shape.public_items, shape.unsafe_blocks), (3, 1));
        let imports: Vec<_> = shape.imports.iter().map(|path| path.join("::")).collect();
        assert_eq!(imports, ["a::B", "c", "x::d::E"]);
    }

    #[test]
    fn a_file_declared_only_for_tests_counts_as_test_code() {
        let mut numbers = Numbers { sources: vec![source("net", &["x"], FILE)], ..Numbers::default() };
        numbers.sources.push(source("net", &["x", "fixtures"], "struct Four;\n"));
        numbers.sources.push(source("relay", &["x", "fixtures"], "struct Five;\n"));
        numbers.set_test_files_apart();
        assert_eq!(numbers.all_test_lines(), 9);
        assert_eq!(numbers.types().into_keys().collect::<Vec<_>>(), ["Five", "One", "Two"]);
    }

    #[test]
    fn mutual_imports_of_two_files_are_a_cycle() {
        let sources = vec![
            source("net", &[], "mod a; mod b; mod c;"),
            source("net", &["a"], "use crate::b::B;"),
            source("net", &["b"], "use super::a::A;"),
            source("net", &["c"], "use crate::{a::A, b::B};"),
            source("relay", &["a"], "use crate::c::C;"),
            source("relay", &["c"], ""),
        ];
        let numbers = Numbers { sources, ..Numbers::default() };
        assert_eq!(numbers.cycles(), [("net::a".to_owned(), "net::b".to_owned())]);
    }

    #[test]
    fn files_of_this_repository_do_not_import_each_other() {
        let root = repository().expect("xtask is in the repository");
        let numbers = Numbers::of(&root.join("crates")).expect("sources can be parsed");
        assert!(numbers.sources.iter().any(|source| !source.shape.imports.is_empty()));
        let cycles = numbers.cycles();
        assert!(cycles.is_empty(), "{cycles:?}");
    }

    #[test]
    fn a_type_name_in_two_crates_is_listed_with_both() {
        let sources = vec![source("net", &["a"], "struct A;"), source("relay", &[], "enum A {}")];
        let numbers = Numbers { sources, ..Numbers::default() };
        assert_eq!(numbers.types()["A"], ["net::a", "relay"]);
    }
}
