//! How far a suite has come: which rows have a record, which failed. Written after each row, so that an interrupted suite goes on
//! where it was.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    console::Console,
    environment,
    error::LabError,
    record::{Record, write_json},
    report,
    request::RunRequest,
    run::{self, stage::RunStage},
    stop::StopFlag,
};

/// File name inside the suite's directory.
const FILE: &str = "suite.json";

/// A suite in its directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SuiteJournal {
    pub(crate) name: String,
    pub(crate) about: String,
    pub(crate) rows: Vec<JournalRow>,
    /// Where it lies: it may have been moved since.
    #[serde(skip)]
    directory: PathBuf,
}

/// A row and what has become of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct JournalRow {
    pub(crate) title: String,
    /// Directory of its record, below that of the suite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    record: Option<String>,
    /// Why it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<String>,
}

impl SuiteJournal {
    /// Begins a suite in a directory of its own below `base`. Each of its rows has a title, and what it will ask.
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
            fs::create_dir_all(&place).map_err(LabError::io(format!("cannot make {}", place.display())))?;
            request.save(&place)?;
        }
        journal.save()?;
        Ok(journal)
    }

    /// Whether a suite lies there.
    pub(crate) fn is_in(directory: &Path) -> bool {
        directory.join(FILE).is_file()
    }

    /// The suite in `directory`.
    pub(crate) fn load(directory: &Path) -> Result<Self, LabError> {
        let path = directory.join(FILE);
        let refuse = |why: String| {
            LabError::usage(format!("{}: {why}: name a directory that `lab suite` left", path.display()))
        };
        let text = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
        let journal: Self = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
        Ok(Self { directory: directory.to_owned(), ..journal })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The record of a row, where there is one.
    pub(crate) fn record(&self, entry: &JournalRow) -> Option<Record> {
        Record::load(&self.directory.join(entry.record.as_ref()?)).ok()
    }

    /// Rows without a record.
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

/// Makes the rows that have no record yet, those that failed among them, one after the other. Ends early when `stop` says so.
pub(crate) fn carry_on(journal: &mut SuiteJournal, stop: &StopFlag) -> Result<(), LabError> {
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
            // The other rows may do without what is missing here.
            Err(error) => {
                screen.note(&format!("row {}: {error}", index + 1));
                journal.rows[index].failed = Some(error.to_string());
            }
        }
        journal.save()?;
    }
    Ok(())
}

/// The name of a row's record; none if it was interrupted: then it is not whole.
fn make(request: &RunRequest, base: &Path, stop: &StopFlag) -> Result<Option<String>, LabError> {
    let stage = RunStage::set(request, base, stop)?;
    let record = run::carry_out(request, &stage)?;
    if record.interrupted {
        return Ok(None);
    }
    report::save(&stage.directory, &record)?;
    Ok(stage.directory.file_name().map(|name| name.to_string_lossy().into_owned()))
}
