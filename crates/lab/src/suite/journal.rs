//! Progress of a suite: which rows have a record and which failed. Saved after each row, so that an
//! interrupted suite can continue.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    console::Console,
    environment,
    error::LabError,
    record::{RunRecord, write_json},
    report,
    request::RunRequest,
    run::{self, stage::RunStage},
    stop::StopFlag,
};

const FILE: &str = "suite.json";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SuiteJournal {
    pub(crate) name: String,
    pub(crate) about: String,
    pub(crate) rows: Vec<JournalRow>,
    #[serde(skip)]
    directory: PathBuf,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct JournalRow {
    pub(crate) title: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    record: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<String>,
}

impl SuiteJournal {
    pub(crate) fn begin(
        name: &str,
        about: &str,
        rows: &[(String, RunRequest)],
        base: &Path,
    ) -> Result<Self, LabError> {
        let entry =
            |(title, _): &(String, RunRequest)| JournalRow { title: title.clone(), ..JournalRow::default() };
        let journal = Self {
            name: name.to_owned(),
            about: about.to_owned(),
            rows: rows.iter().map(entry).collect(),
            directory: base.join(format!("suite-{name}-{}", environment::stamp())),
        };
        for (index, (_, request)) in rows.iter().enumerate() {
            let place = journal.request_of(index);
            fs::create_dir_all(&place).map_err(LabError::io(format!("cannot create {}", place.display())))?;
            request.save(&place)?;
        }
        journal.save()?;
        Ok(journal)
    }

    pub(crate) fn is_in(directory: &Path) -> bool {
        directory.join(FILE).is_file()
    }

    pub(crate) fn load(directory: &Path) -> Result<Self, LabError> {
        let path = directory.join(FILE);
        let refuse = |why: String| {
            LabError::usage(format!("{}: {why}: give a directory written by `lab suite`", path.display()))
        };
        let text = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
        let journal: Self = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
        Ok(Self { directory: directory.to_owned(), ..journal })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn record(&self, entry: &JournalRow) -> Option<RunRecord> {
        RunRecord::load(&self.directory.join(entry.record.as_ref()?)).ok()
    }

    pub(crate) fn left(&self) -> usize {
        self.rows.iter().filter(|entry| entry.record.is_none()).count()
    }

    fn request_of(&self, index: usize) -> PathBuf {
        self.directory.join("rows").join(format!("{:02}", index + 1))
    }

    fn save(&self) -> Result<(), LabError> {
        write_json(&self.directory.join(FILE), self)
    }
}

/// Runs all rows that have no record, including those that failed.
pub(crate) fn run_remaining_rows(journal: &mut SuiteJournal, stop: &StopFlag) -> Result<(), LabError> {
    let (screen, of) = (Console::new(), journal.rows.len());
    for index in 0..of {
        if journal.rows[index].record.is_some() || stop.requested() {
            continue;
        }
        screen.note(&format!("row {} of {of}: {}", index + 1, journal.rows[index].title));
        let request = RunRequest::load(&journal.request_of(index))?;
        match make(&request, &journal.directory, stop) {
            Ok(None) => return Ok(()),
            Ok(Some(name)) => {
                journal.rows[index].record = Some(name);
                journal.rows[index].failed = None;
            }
            // Continue, because other rows may not need the missing program.
            Err(error) => {
                screen.note(&format!("row {}: {error}", index + 1));
                journal.rows[index].failed = Some(error.to_string());
            }
        }
        journal.save()?;
    }
    Ok(())
}

fn make(request: &RunRequest, base: &Path, stop: &StopFlag) -> Result<Option<String>, LabError> {
    let stage = RunStage::set(request, base, stop)?;
    let record = run::execute(request, &stage)?;
    if record.interrupted {
        return Ok(None);
    }
    report::save(&stage.directory, &record)?;
    Ok(stage.directory.file_name().map(|name| name.to_string_lossy().into_owned()))
}
