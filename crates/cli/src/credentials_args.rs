//! Flags of `turnpike credentials`.

use std::{fs, io, path::PathBuf};

use clap::{ArgGroup, Args};
use turnpike_config::{Secret, access_tokens, restapi_credentials, secret_file};

#[derive(Args)]
#[command(group = ArgGroup::new("source").required(true))]
pub(crate) struct CredentialsArgs {
    /// Username; with a shared secret, the id that quotas apply to; with a token key, its kid
    #[arg(long, value_name = "NAME")]
    user: String,

    /// Shared secret from the server's auth.secrets. Other users on this machine can see it in the process list
    #[arg(long, value_name = "S", group = "source", value_parser = secret)]
    secret: Option<String>,

    /// File whose first line is the shared secret; "-" is standard input
    #[arg(long, value_name = "FILE", group = "source")]
    secret_file: Option<PathBuf>,

    /// Password to derive stored keys from. Other users on this machine can see it in the process list
    #[arg(long, value_name = "PASSWORD", group = "source", value_parser = password)]
    password: Option<String>,

    /// File whose first line is the password; "-" is standard input
    #[arg(long, value_name = "FILE", group = "source")]
    password_file: Option<PathBuf>,

    /// Key shared with the server (oauth.key), base64, to create an access token (RFC 7635). Other users of
    /// this machine can see it in the process list
    #[arg(long, value_name = "KEY", group = "source", requires = "server_name")]
    token_key: Option<String>,

    /// File whose first line is the key; "-" is standard input
    #[arg(long, value_name = "FILE", group = "source", requires = "server_name")]
    token_key_file: Option<PathBuf>,

    /// Server that accepts the access token (its oauth.server_name)
    #[arg(long, value_name = "NAME")]
    server_name: Option<String>,

    /// Lifetime of time-limited credentials and access tokens in seconds, at least 1
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..=315_360_000))]
    ttl: u64,

    /// Realm of the stored keys
    #[arg(long, value_name = "R", default_value = "turnpike")]
    realm: String,
}

impl CredentialsArgs {
    pub(crate) fn make(self) -> io::Result<String> {
        if let Some(secret) = given(self.secret, self.secret_file)? {
            return Ok(restapi_credentials::time_limited(&secret, &self.user, self.ttl));
        }
        if let Some(key) = given(self.token_key, self.token_key_file)? {
            let name = self.server_name.unwrap_or_default();
            let ttl = u32::try_from(self.ttl).unwrap_or(u32::MAX);
            return access_tokens::access_token(&key, &self.user, &name, ttl, rand::random())
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error));
        }
        let password = given(self.password, self.password_file)?.unwrap_or_else(|| Secret::new(""));
        Ok(restapi_credentials::user_entry(&self.user, &self.realm, &password))
    }
}

fn secret(text: &str) -> Result<String, &'static str> {
    not_empty(text, "the secret is empty")
}

fn password(text: &str) -> Result<String, &'static str> {
    not_empty(text, "the password is empty")
}

fn not_empty(text: &str, why: &'static str) -> Result<String, &'static str> {
    if text.is_empty() { Err(why) } else { Ok(text.to_owned()) }
}

fn given(text: Option<String>, file: Option<PathBuf>) -> io::Result<Option<Secret>> {
    let Some(path) = file else {
        return Ok(text.map(Secret::new));
    };
    let content =
        if path.as_os_str() == "-" { io::read_to_string(io::stdin()) } else { fs::read_to_string(&path) };
    let content = content
        .map(Secret::new)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display())))?;
    let found = secret_file::first_secret(content.reveal());
    found
        .map(Some)
        .map_err(|why| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display())))
}
