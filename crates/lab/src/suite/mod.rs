//! Suites: several experiments in one table. Each row is an experiment with given values for its variables; it has a record of its own and
//! is checked against its thresholds.

mod journal;
mod table;

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;
use turnpike_strict::Document;

pub(crate) use self::{
    journal::{SuiteJournal, run_remaining_rows},
    table::SuiteTable,
};
use crate::{
    builtin_experiments::EXPERIMENTS,
    cli::RunOptions,
    error::LabError,
    experiment::plain,
    record::Threshold,
    request::{RowSettings, RunRequest, Task},
    search::{RatePlan, SearchOptions},
    topology::spec::{PLAIN, is_plain},
};

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Suite {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) about: String,
    row: Vec<SuiteRow>,
    #[serde(skip)]
    experiments: std::path::PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SuiteRow {
    title: String,
    experiment: String,
    /// Values of variables; must include all swept ones.
    #[serde(default)]
    set: BTreeMap<String, toml::Value>,
    topology: Option<String>,
    /// Settings of a search, which replaces the comparison at one rate.
    find_max: Option<SearchOptions>,
    #[serde(default)]
    must: Vec<Threshold>,
    #[serde(default)]
    aim: Vec<Threshold>,
}

impl Suite {
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, LabError> {
        let (mut suite, mut document): (Self, _) = Document::parse(path, text)?;
        suite.check(&mut document);
        document.finish()?;
        // Suites are in a folder inside `experiments` in the built-in layout; elsewhere both share a
        // directory.
        let folder = path.parent().unwrap_or(Path::new("."));
        let is_apart = folder.file_name().is_some_and(|name| name == "suites");
        suite.experiments = if is_apart { folder.join("..") } else { folder.to_owned() };
        Ok(suite)
    }

    pub(crate) fn only(mut self, texts: &[String]) -> Result<Self, LabError> {
        let has = |row: &SuiteRow, text: &String| row.title.contains(text) || row.experiment.contains(text);
        self.row.retain(|row| texts.is_empty() || texts.iter().any(|text| has(row, text)));
        if self.row.is_empty() {
            return Err(LabError::usage(format!("--only: no row of suite {} contains that text", self.name)));
        }
        Ok(self)
    }

    pub(crate) fn requests(&self, options: &RunOptions) -> Result<Vec<(String, RunRequest)>, LabError> {
        let (mut requests, mut mistakes) = (Vec::new(), Vec::new());
        for row in &self.row {
            match self.request(row, options) {
                Ok(request) => requests.push((row.title.clone(), request)),
                Err(error) => mistakes.push(format!("row \"{}\": {error}", row.title)),
            }
        }
        if mistakes.is_empty() { Ok(requests) } else { Err(LabError::usage(mistakes.join("\n"))) }
    }

    fn request(&self, row: &SuiteRow, options: &RunOptions) -> Result<RunRequest, LabError> {
        let text = EXPERIMENTS.find(Path::new(&row.experiment), &self.experiments)?;
        let values = row.set.iter().map(|(name, value)| format!("{name}={}", plain(value)));
        let values: Vec<String> = values.chain(options.set.iter().cloned()).collect();
        let variant = RowSettings {
            topology: options.topology.clone().or_else(|| row.topology.clone()),
            must: row.must.clone(),
            aim: row.aim.clone(),
        };
        let mut changes = options.changes.clone();
        let of_search = row.find_max.as_ref().and_then(|search| search.max_late_us);
        changes.max_late_us = changes.max_late_us.or(of_search);
        let mut requests = RunRequest::of(text, &changes, &variant, &values)?;
        if requests.len() != 1 {
            let (name, points) = (&row.experiment, requests.len());
            return Err(LabError::usage(format!("{name} sweeps {points} points: set its swept variables")));
        }
        let mut request = requests.remove(0);
        if let Some(search) = &row.find_max {
            let plan = RatePlan::FindMax(search.settings().map_err(LabError::usage)?);
            request.task = Task::Rates { plan, rounds: request.experiment()?.rounds };
        }
        Ok(request)
    }

    fn check(&self, document: &mut Document) {
        if !is_plain(&self.name, 32) {
            document.problem("name", format!("name \"{}\": expected {PLAIN}", self.name));
        }
        for (index, row) in self.row.iter().enumerate() {
            for (list, bars) in [("must", &row.must), ("aim", &row.aim)] {
                for (place, bar) in bars.iter().enumerate() {
                    if let Some(mistake) = bar.mistake() {
                        document.problem(&format!("row[{index}].{list}[{place}]"), mistake);
                    }
                }
            }
            if let Some(Err(mistake)) = row.find_max.as_ref().map(SearchOptions::settings) {
                document.problem(&format!("row[{index}].find_max"), mistake);
            }
            if self.row[..index].iter().any(|other| other.title == row.title) {
                document.problem(&format!("row[{index}].title"), format!("\"{}\" is used twice", row.title));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;
    use crate::request::Overrides;

    const EXPERIMENT: &str = "name = 'x'\nmetric = 'delivered_pps'\ntopology = 'host'\n[sweep]\nclients = [1, 8]\n\
        [[subject]]\nname = 'a'\ncommand = 'sleep 60'\n[workload]\ncommand = 'true {clients}'\nformat = 'none'\n";

    fn parse(text: &str) -> Result<Suite, LabError> {
        Suite::parse(Path::new("s.toml"), text)
    }

    #[test]
    fn all_errors_in_a_suite_are_reported_with_positions() {
        let told = parse(
            "name = 'S'\n[[row]]\ntitle = 'one'\nexperimnt = 'x'\n[[row]]\ntitle = 'one'\nexperiment = 'x'\n\
             must = [{ metric = 'delivered_pps' }]\n",
        )
        .unwrap_err()
        .to_string();
        for part in [
            "s.toml:1:8: name \"S\"",
            "s.toml:4:1: unknown key \"experimnt\"; did you mean \"experiment\"?",
            "s.toml:6:9: \"one\" is used twice",
            "s.toml:8:9: a threshold needs exactly one of at_least and at_most",
        ] {
            assert!(told.contains(part), "{part} is missing from {told}");
        }
    }

    #[test]
    fn a_row_can_search_for_the_highest_rate() {
        let directory = Dir::new();
        std::fs::write(directory.at("x.toml"), EXPERIMENT).unwrap();
        let row = |search: &str| {
            let text = format!(
                "name = 's'\n[[row]]\ntitle = 'most'\nexperiment = 'x'\nset = {{ clients = 8 }}\nfind_max = {search}\n"
            );
            Suite::parse(&directory.at("s.toml"), &text)
        };
        let suite =
            row("{ min = 10, max = 500, loss = 0.1, max_p99_us = 20000, max_late_us = 5000 }").unwrap();
        let changes = Overrides { rounds: Some(7), ..Overrides::default() };
        let requests = suite.requests(&RunOptions { changes, ..RunOptions::default() }).unwrap();
        let Task::Rates { plan: RatePlan::FindMax(settings), rounds: 7 } = &requests[0].1.task else {
            panic!("{:?}", requests[0].1.task)
        };
        assert_eq!((settings.min_pps, settings.max_pps, &settings.goals[..]), (10, 500, &[0.001][..]));
        assert_eq!(requests[0].1.changes.max_late_us, Some(5_000.0));
        assert_eq!((settings.max_p99_us, settings.width, settings.long_s), (Some(20_000.0), 0.03, 3.0));
        let told = row("{ min = 10, max = 5, loss = 0.1 }").unwrap_err().to_string();
        assert!(told.contains("s.toml:6:12: min 10 and max 5: expected 0 < min < max"), "{told}");
        assert!(row("{ min = 10, max = 50, los = 0.1 }").unwrap_err().to_string().contains("\"loss\""));
    }

    #[test]
    fn a_row_is_one_combination_with_its_own_thresholds() {
        let directory = Dir::new();
        std::fs::write(directory.at("x.toml"), EXPERIMENT).unwrap();
        let text = "name = 's'\n[[row]]\ntitle = 'eight'\nexperiment = 'x'\nset = { clients = 8 }\n\
            must = [{ metric = 'delivered_pps', at_least = 2 }]\n[[row]]\ntitle = 'all'\nexperiment = 'x'\n";
        let suite = Suite::parse(&directory.at("s.toml"), text).unwrap();
        let told = suite.requests(&RunOptions::default()).unwrap_err().to_string();
        assert_eq!(told, "row \"all\": x sweeps 2 points: set its swept variables");
        let suite = suite.only(&["eig".to_owned()]).unwrap();
        let [(_, request)] = &suite.requests(&RunOptions::default()).unwrap()[..] else {
            panic!("not one row")
        };
        assert_eq!(request.point["clients"], "8");
        assert_eq!(request.experiment().unwrap().must[0].at_least, Some(2.0));
        assert!(suite.clone().only(&["nine".to_owned()]).is_err());
        let set = RunOptions {
            set: vec!["clients=3".to_owned()],
            topology: Some("veth".to_owned()),
            ..RunOptions::default()
        };
        let set = suite.requests(&set).unwrap();
        assert_eq!((&*set[0].1.point["clients"], &*set[0].1.experiment().unwrap().topology), ("3", "veth"));
    }
}
