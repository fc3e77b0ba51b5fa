//! What a key is: its name, what is expected, how it is read, how it is shown. Generic over what it is read into, because
//! `serve`, `forward` and a single forwarding rule each have a table of keys and work alike.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{
    AdminListen, LogFormat, Origin,
    read::Reader,
    source::{Node, Value},
};

/// One key of a table that is read into an `S`.
pub(crate) struct KeySpec<S> {
    /// `section.key`.
    pub(crate) path: &'static str,
    /// Completes "expected ...".
    pub(crate) expected: &'static str,
    /// Flags repeat and environment variables are split at commas.
    pub(crate) list: bool,
    /// Its value must not be shown, and `TURNPIKE_..._FILE` works.
    pub(crate) secret: bool,
    /// Whether a reload applies it.
    pub(crate) reload: bool,
    /// Reads a value into the settings; whether that worked.
    pub(crate) apply: fn(&mut Reader<'_>, &Node, &mut S) -> Option<()>,
    /// The effective value as TOML, secrets masked.
    pub(crate) show: fn(&S) -> String,
}

impl<S> KeySpec<S> {
    pub(crate) fn section(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(section, _)| section)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }

    pub(crate) fn variable(&self) -> String {
        format!("TURNPIKE_{}", self.path.replace('.', "_").to_uppercase())
    }

    /// The names of its environment variables.
    pub(crate) fn variables(&self) -> Vec<String> {
        let name = self.variable();
        let file = self.secret.then(|| format!("{name}_FILE"));
        [Some(name), file].into_iter().flatten().collect()
    }
}

/// A key that is no list and no secret; `reload` as given.
macro_rules! scalar {
    ($path:literal, reload: $reload:literal, $expected:expr, $apply:expr, $show:expr $(,)?) => {
        $crate::config::key::KeySpec {
            path: $path,
            expected: $expected,
            list: false,
            secret: false,
            reload: $reload,
            apply: $apply,
            show: $show,
        }
    };
}
pub(crate) use scalar;

/// The settings as a TOML file with each value's origin, secrets masked.
pub(crate) fn table_as_toml<S>(
    keys: &[KeySpec<S>],
    settings: &S,
    origins: &BTreeMap<&'static str, Origin>,
) -> String {
    let mut text = String::new();
    let mut section = "";
    for spec in keys {
        if spec.section() != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            section = spec.section();
            let _ = writeln!(text, "{gap}[{section}]");
        }
        let origin = origins.get(spec.path).unwrap_or(&Origin::Default);
        let _ = writeln!(text, "{} = {} # {origin}", spec.name(), (spec.show)(settings));
    }
    text
}

/// Keys whose value differs, but which a running program cannot change.
pub(crate) fn unchangeable<S>(keys: &[KeySpec<S>], old: &S, new: &S) -> Vec<&'static str> {
    keys.iter()
        .filter(|spec| !spec.reload && (spec.show)(old) != (spec.show)(new))
        .map(|spec| spec.path)
        .collect()
}

/// "expected ..." of the keys that `serve` and `forward` share.
pub(crate) mod expected {
    pub(crate) const WORKERS: &str = "a number of threads, 1 to 1024, or \"auto\" for one per core";
    pub(crate) const DATAPATH: &str = "\"auto\", \"basic\", \"mmsg\" or \"gso\"";
    pub(crate) const ADMIN: &str = "\"ADDR:PORT\" or \"off\"";
    pub(crate) const LOG_LEVEL: &str =
        "error, warn, info, debug, trace, off, or a filter such as \"info,turnpike_relay=debug\"";
    pub(crate) const LOG_FORMAT: &str = "\"text\" or \"json\"";
    pub(crate) const DEADLINE: &str = "seconds, 0 to 86400";
}

/// A number of threads; `None` inside is one per core.
pub(crate) fn workers(reader: &mut Reader<'_>, node: &Node) -> Option<Option<usize>> {
    match &node.value {
        Value::Text(text) if text == "auto" => Some(None),
        _ => reader.integer(node, &(1..=1024)).map(Some),
    }
}

/// A step of the ladder; `None` inside is the best one.
pub(crate) fn datapath(reader: &mut Reader<'_>, node: &Node) -> Option<Option<turnpike_net::Datapath>> {
    reader.parsed(node, |text| match text {
        // `Datapath::from_str("auto")` asks the kernel, and nothing here may open a socket.
        "auto" => Ok(None),
        other => other.parse().map(Some).map_err(|_| ""),
    })
}

/// Where the admin page listens.
pub(crate) fn admin(reader: &mut Reader<'_>, node: &Node) -> Option<AdminListen> {
    reader.parsed(node, |text| match text {
        "off" => Ok(AdminListen::Off),
        address => address.parse().map(AdminListen::On).map_err(|_| ""),
    })
}

/// A filter of log lines.
pub(crate) fn log_level(reader: &mut Reader<'_>, node: &Node) -> Option<String> {
    reader.parsed(node, |text| crate::logging::check_filter(text).map(|()| text.to_owned()))
}

/// How log lines look.
pub(crate) fn log_format(reader: &mut Reader<'_>, node: &Node) -> Option<LogFormat> {
    reader.parsed(node, |text| match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(""),
    })
}

/// The opposites of the readers above: values as TOML.
pub(crate) mod show {
    use super::{AdminListen, LogFormat};

    pub(crate) fn workers(workers: Option<usize>) -> String {
        workers.map_or_else(|| quoted("auto"), |workers| workers.to_string())
    }

    pub(crate) fn datapath(datapath: Option<turnpike_net::Datapath>) -> String {
        datapath.map_or_else(|| quoted("auto"), |step| quoted(&step.to_string()))
    }

    pub(crate) fn admin(admin: AdminListen) -> String {
        match admin {
            AdminListen::Off => quoted("off"),
            AdminListen::On(address) => quoted(&address.to_string()),
        }
    }

    pub(crate) fn log_format(format: LogFormat) -> String {
        quoted(match format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        })
    }

    pub(crate) fn strings<T: ToString>(items: &[T]) -> String {
        list(items.iter().map(|item| quoted(&item.to_string())))
    }

    pub(crate) fn list(items: impl Iterator<Item = String>) -> String {
        format!("[{}]", items.collect::<Vec<_>>().join(", "))
    }

    pub(crate) fn quoted(text: &str) -> String {
        toml::Value::String(text.to_owned()).to_string()
    }
}
