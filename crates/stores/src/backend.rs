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

    /// Makes a change, which is atomic: of several at once, each sees the store as another has left it. Returns whether it was there
    /// before; for a removal, whether it was there at all.
    fn apply(&self, edit: &Edit, existing: Existing)
    -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The same, in place of what there is.
    fn edit(&self, edit: &Edit) -> impl Future<Output = Result<bool, StoreError>> + Send {
        self.apply(edit, Existing::Replace)
    }
}

/// What a change does to a user, secret, key or realm that is there already. Removals and rotations take no notice of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Takes its place.
    Replace,
    /// Leaves it as it is.
    Keep,
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
