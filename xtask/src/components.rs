//! `cargo xtask components`: writes the bill of materials (CycloneDX 1.5) of the released binaries: crates that are linked into them or
//! expand macros for them, with licence, hash and dependencies. Contains neither times nor paths, so it is reproducible.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    process::ExitCode,
};

use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Failure, builder::MUSL, cargo, debian::said, repository};

#[derive(Args)]
pub(crate) struct Options {
    /// File to write [default: standard output]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// A crate in the form `NAME VERSION`.
type Name = String;

#[derive(Debug, Default, PartialEq, Eq)]
struct Component {
    licence: String,
    dependencies: BTreeSet<Name>,
}

#[derive(Deserialize)]
struct LockFile {
    package: Vec<Locked>,
}

#[derive(Deserialize)]
struct Locked {
    name: String,
    version: String,
    checksum: Option<String>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let repository = repository()?;
    let mut tree = cargo(&repository);
    tree.args(["tree", "--locked", "--package=turnpike-cli", "--edges=normal", "--prefix=depth"])
        .args(["--format", " {p}|{l}"])
        .args(MUSL.iter().flat_map(|musl| ["--target", musl.target]));
    let components = components(&said(&mut tree)?)?;
    let locked: LockFile = toml::from_str(&fs::read_to_string(repository.join("Cargo.lock"))?)?;
    let hashes = locked
        .package
        .into_iter()
        .filter_map(|it| Some((format!("{} {}", it.name, it.version), it.checksum?)))
        .collect();
    let text = serde_json::to_string_pretty(&document(&components, &hashes)?)? + "\n";
    match &options.output {
        Some(file) => fs::write(file, text)?,
        None => print!("{text}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads lines of `cargo tree` in the form `DEPTH NAME vVERSION [(PATH)]|LICENCE [(*)]`. The star marks a crate whose dependencies are
/// listed elsewhere.
fn components(tree: &str) -> Result<BTreeMap<Name, Component>, Failure> {
    let mut components: BTreeMap<Name, Component> = BTreeMap::new();
    let mut above: Vec<Name> = Vec::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let parts = || {
            let (package, licence) = line.split_once('|')?;
            let mut words = package.split(' ');
            let depth: usize = words.next()?.parse().ok()?;
            Some((depth, format!("{} {}", words.next()?, words.next()?.strip_prefix('v')?), licence))
        };
        let (depth, name, licence) =
            parts().ok_or_else(|| format!("unexpected line of cargo tree: {line}"))?;
        above.truncate(depth);
        if let Some(parent) = above.last().and_then(|parent| components.get_mut(parent)) {
            parent.dependencies.insert(name.clone());
        }
        // Some crates still separate alternatives with a slash, which is no SPDX expression.
        let licence =
            licence.trim_end_matches(" (*)").split('/').map(str::trim).collect::<Vec<_>>().join(" OR ");
        components.entry(name.clone()).or_default().licence = licence;
        above.push(name);
    }
    Ok(components)
}

fn document(
    components: &BTreeMap<Name, Component>,
    hashes: &BTreeMap<Name, String>,
) -> Result<Value, Failure> {
    let is_program = |name: &str| name.starts_with("turnpike-cli ");
    let (program, _) = components
        .iter()
        .find(|(name, _)| is_program(name))
        .ok_or("cargo tree does not list turnpike-cli")?;
    let libraries: Vec<Value> = components
        .iter()
        .filter(|(name, _)| !is_program(name))
        .map(|(name, component)| entry("library", name, component, hashes.get(name)))
        .collect();
    let dependencies: Vec<Value> = components
        .iter()
        .map(|(name, it)| {
            json!({ "ref": purl(name), "dependsOn": it.dependencies.iter().map(|name| purl(name)).collect::<Vec<_>>() })
        })
        .collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": entry("application", program, &components[program], None) },
        "components": libraries,
        "dependencies": dependencies,
    }))
}

fn entry(kind: &str, name: &str, component: &Component, hash: Option<&String>) -> Value {
    let (crate_name, version) = name.split_once(' ').unwrap_or((name, ""));
    let mut entry = json!({
        "type": kind,
        "bom-ref": purl(name),
        "name": crate_name,
        "version": version,
        "purl": purl(name),
        "licenses": [{ "expression": component.licence }],
    });
    if let Some(hash) = hash {
        entry["hashes"] = json!([{ "alg": "SHA-256", "content": hash }]);
    }
    entry
}

/// Package URL: identifies a package in all registries. `+` of a version is reserved.
fn purl(name: &str) -> String {
    format!("pkg:cargo/{}", name.replace(' ', "@").replace('+', "%2B"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0 turnpike-cli v0.2.0 (/somewhere/crates/cli)|MIT OR Apache-2.0\n\
                        1 one v1.0.0|MIT/Apache-2.0\n\
                        2 two v2.0.0+build (proc-macro)|MIT\n\
                        1 two v2.0.0+build (proc-macro)|MIT (*)\n";

    #[test]
    fn every_crate_is_listed_once_with_its_dependencies() {
        let components = components(TREE).expect("a tree");
        let hashes = BTreeMap::from([("one 1.0.0".to_owned(), "ab".to_owned())]);
        let document = document(&components, &hashes).expect("a program");
        assert_eq!(document["metadata"]["component"]["version"], "0.2.0");
        let listed = document["components"].as_array().expect("a list");
        assert_eq!(listed.len(), 2, "{document}");
        assert_eq!(listed[0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(listed[0]["hashes"][0]["content"], "ab");
        assert_eq!(listed[1]["purl"], "pkg:cargo/two@2.0.0%2Bbuild");
        let all = document["dependencies"].as_array().expect("a list");
        assert_eq!(all[0]["dependsOn"], json!(["pkg:cargo/two@2.0.0%2Bbuild"]));
        assert_eq!(all[1]["dependsOn"], json!(["pkg:cargo/one@1.0.0", "pkg:cargo/two@2.0.0%2Bbuild"]));
        assert!(!document.to_string().contains("somewhere"));
    }

    #[test]
    fn unexpected_line_is_an_error() {
        let failure = components("0 turnpike-cli").expect_err("no version").to_string();
        assert!(failure.contains("0 turnpike-cli"), "{failure}");
    }
}
