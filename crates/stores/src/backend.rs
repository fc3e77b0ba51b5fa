//! Operations that each database implements: four queries, a list of users, and changes.

use crate::{Edit, Rules, StoreError, StoredSecret, UserKeys};

/// A database. Its methods run on the control thread's runtime and may wait.
pub trait Backend: Send + Sync + 'static {
    fn user(
        &self,
        realm: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<UserKeys>, StoreError>> + Send;

    fn secrets(&self, realm: &str) -> impl Future<Output = Result<Vec<StoredSecret>, StoreError>> + Send;

    /// Everything except users. Also checks the schema.
    fn rules(&self) -> impl Future<Output = Result<Rules, StoreError>> + Send;

    /// A number that changes with every write; `None` if the database cannot provide it cheaply.
    fn version(&self) -> impl Future<Output = Option<u64>> + Send {
        async { None }
    }

    /// Users of one realm or of all, ordered by realm and name: at most 1,000, beginning after `after`.
    fn users(
        &self,
        realm: Option<&str>,
        after: Option<&UserRow>,
    ) -> impl Future<Output = Result<Vec<UserRow>, StoreError>> + Send;

    /// Makes a change atomically. Returns true if the item existed before.
    fn apply(&self, edit: &Edit, existing: Existing)
    -> impl Future<Output = Result<bool, StoreError>> + Send;

    fn edit(&self, edit: &Edit) -> impl Future<Output = Result<bool, StoreError>> + Send {
        self.apply(edit, Existing::Replace)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Replace,
    Keep,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserRow {
    pub realm: String,
    pub name: String,
    pub keys: &'static str,
}

/// Maximum number of users that [`Backend::users`] returns; the last page has fewer.
pub const PAGE: usize = 1000;
