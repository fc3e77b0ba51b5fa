pub(crate) mod halt;
pub(crate) mod ready;
pub(crate) mod result;
pub(crate) mod session;
