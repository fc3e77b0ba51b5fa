//! What every database can do, whatever it is: four questions, a list, and a change.

use crate::{Edit, Rules, StoreError, StoredSecret, UserKeys};

/// A database. All of it is asked on the control thread's runtime, and may wait there.
pub trait Backend: Send + Sync + 'static {
    /// The keys of a user, if there is such a user.
    fn user(
        &self,
        realm: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<UserKeys>, StoreError>> + Send;

    /// The secrets of a realm.
    fn secrets(&self, realm: &str) -> impl Future<Output = Result<Vec<StoredSecret>, StoreError>> + Send;

    /// Everything but users. Says also whether the schema is the right one.
    fn rules(&self) -> impl Future<Output = Result<Rules, StoreError>> + Send;

    /// A number that changes whenever anything has been written; `None` where that cannot be told cheaply.
    fn version(&self) -> impl Future<Output = Option<u64>> + Send {
        async { None }
    }

    /// Users in the order of realm and name, of one realm or of all, at most 1,000 of them that come after `after`.
    fn users(
        &self,
        realm: Option<&str>,
        after: Option<&UserRow>,
    ) -> impl Future<Output = Result<Vec<UserRow>, StoreError>> + Send;

    /// Changes something. Whether it was there before; for what is removed, whether it was there at all.
    fn edit(&self, edit: &Edit) -> impl Future<Output = Result<bool, StoreError>> + Send;
}

/// A user in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserRow {
    /// Where.
    pub realm: String,
    /// Who.
    pub name: String,
    /// The algorithms of the keys, for people: [`UserKeys::kinds`].
    pub keys: &'static str,
}

/// The most that [`Backend::users`] gives at once; fewer are the last ones.
pub const PAGE: usize = 1000;
