//! Settings of a topic under Kafka's names, and the grammar of topic names.
//!
//! A topic record keeps only what was set for it ([`TopicConfig`]); the node's defaults fill the rest, so that a
//! changed default reaches topics that never chose.

use std::collections::BTreeMap;
use std::str::FromStr;

use ringfence_engine::batch::TimestampType;
use ringfence_engine::limits::{BLOCK, MAX_BATCH_BYTES, MAX_SEGMENT_BYTES};
use ringfence_engine::store::LogSettings;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::keys::put;

/// Longest topic name, as in Kafka.
pub(super) const MAX_TOPIC_NAME: usize = 249;

/// Why a topic name is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TopicNameError {
    #[error("a topic name has 1 to {MAX_TOPIC_NAME} characters, this one {0}")]
    Length(usize),
    #[error("'.' and '..' are not topic names")]
    Dots,
    #[error("a topic name holds only letters, digits, '.', '_' and '-'")]
    Character,
}

/// Checks `name` against Kafka's grammar: 1 to 249 of `[a-zA-Z0-9._-]`, not "." or "..".
///
/// # Errors
/// Which rule is broken.
pub fn check_topic_name(name: &str) -> Result<(), TopicNameError> {
    if name.is_empty() || name.len() > MAX_TOPIC_NAME {
        return Err(TopicNameError::Length(name.len()));
    }
    if name == "." || name == ".." {
        return Err(TopicNameError::Dots);
    }
    if !name
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    {
        return Err(TopicNameError::Character);
    }
    Ok(())
}

/// `durability`: when an acknowledgement may be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// After the journal write that holds the record completed.
    #[default]
    Sync,
    /// When the record is in memory; it is synced soon after. A crash may lose acknowledged records.
    Memory,
}

/// All settings of a topic, complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicSettings {
    /// `retention.ms`; `None` is unlimited (-1).
    pub retention_ms: Option<u64>,
    /// `retention.bytes` per partition; `None` is unlimited (-1).
    pub retention_bytes: Option<u64>,
    /// `segment.bytes`.
    pub segment_bytes: u64,
    /// `segment.ms`.
    pub segment_ms: u64,
    /// `max.message.bytes`: the largest record batch, header included.
    pub max_message_bytes: usize,
    /// `min.insync.replicas`.
    pub min_insync_replicas: u32,
    /// `message.timestamp.type`.
    pub timestamp_type: TimestampType,
    /// `durability`.
    pub durability: Durability,
}

impl Default for TopicSettings {
    fn default() -> TopicSettings {
        TopicSettings {
            retention_ms: Some(168 * 3_600_000),
            retention_bytes: None,
            segment_bytes: 1 << 30,
            segment_ms: 168 * 3_600_000,
            max_message_bytes: 1_048_588,
            min_insync_replicas: 1,
            timestamp_type: TimestampType::CreateTime,
            durability: Durability::Sync,
        }
    }
}

impl TopicSettings {
    /// The part the engine needs.
    #[must_use]
    pub fn log(&self) -> LogSettings {
        LogSettings {
            segment_bytes: self.segment_bytes,
            segment_ms: self.segment_ms,
            retention_bytes: self.retention_bytes,
            retention_ms: self.retention_ms,
            max_message_bytes: self.max_message_bytes,
            timestamp_type: self.timestamp_type,
            memory: self.durability == Durability::Memory,
        }
    }
}

/// One topic setting: how it is read into and shown from [`TopicSettings`].
struct TopicKey {
    name: &'static str,
    set: fn(&mut TopicSettings, &str) -> Result<(), String>,
    show: fn(&TopicSettings) -> String,
}

const TOPIC_KEYS: &[TopicKey] = &[
    TopicKey {
        name: "retention.ms",
        set: |s, v| put(&mut s.retention_ms, limit(v)?),
        show: |s| show_limit(s.retention_ms),
    },
    TopicKey {
        name: "retention.bytes",
        set: |s, v| put(&mut s.retention_bytes, limit(v)?),
        show: |s| show_limit(s.retention_bytes),
    },
    TopicKey {
        name: "segment.bytes",
        set: |s, v| put(&mut s.segment_bytes, within(v, BLOCK as u64, MAX_SEGMENT_BYTES)?),
        show: |s| s.segment_bytes.to_string(),
    },
    TopicKey {
        name: "segment.ms",
        set: |s, v| put(&mut s.segment_ms, within(v, 1, i64::MAX as u64)?),
        show: |s| s.segment_ms.to_string(),
    },
    TopicKey {
        name: "max.message.bytes",
        set: |s, v| {
            put(
                &mut s.max_message_bytes,
                within(v, 61, MAX_BATCH_BYTES as u64)? as usize,
            )
        },
        show: |s| s.max_message_bytes.to_string(),
    },
    TopicKey {
        name: "min.insync.replicas",
        set: |s, v| put(&mut s.min_insync_replicas, within(v, 1, 1000)? as u32),
        show: |s| s.min_insync_replicas.to_string(),
    },
    TopicKey {
        name: "message.timestamp.type",
        set: |s, v| put(&mut s.timestamp_type, timestamp_type(v)?),
        show: |s| show_timestamp_type(s.timestamp_type).to_owned(),
    },
    TopicKey {
        name: "durability",
        set: |s, v| put(&mut s.durability, durability(v)?),
        show: |s| show_durability(s.durability).to_owned(),
    },
];

/// Why a topic setting is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TopicConfigError {
    #[error("unknown topic setting '{0}'")]
    UnknownKey(String),
    #[error("topic setting '{key}' = '{value}': {reason}")]
    BadValue {
        key: String,
        value: String,
        reason: String,
    },
    #[error("'{0}' is set twice")]
    Twice(String),
}

/// What was set for one topic; keys and values as text, already validated.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TopicConfig {
    overrides: BTreeMap<String, String>,
}

impl TopicConfig {
    /// A topic's own settings from (key, value) pairs.
    ///
    /// # Errors
    /// The first pair that is unknown, out of range or given twice.
    pub fn new<'a>(
        pairs: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<TopicConfig, TopicConfigError> {
        let mut config = TopicConfig::default();
        for (key, value) in pairs {
            if config.overrides.contains_key(key) {
                return Err(TopicConfigError::Twice(key.to_owned()));
            }
            config.set(key, value)?;
        }
        Ok(config)
    }

    /// Sets one key.
    ///
    /// # Errors
    /// When it is unknown or its value out of range; nothing is changed then.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), TopicConfigError> {
        let known = find(key)?;
        let value = value.trim();
        (known.set)(&mut TopicSettings::default(), value).map_err(|reason| TopicConfigError::BadValue {
            key: key.to_owned(),
            value: value.to_owned(),
            reason,
        })?;
        self.overrides.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    /// Goes back to the node's default for one key; true when it was set.
    ///
    /// # Errors
    /// When the key is unknown.
    pub fn unset(&mut self, key: &str) -> Result<bool, TopicConfigError> {
        find(key)?;
        Ok(self.overrides.remove(key).is_some())
    }

    /// What was set for this topic.
    pub fn overrides(&self) -> impl Iterator<Item = (&str, &str)> {
        self.overrides.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// The complete settings over the node's `defaults`.
    #[must_use]
    pub fn over(&self, defaults: &TopicSettings) -> TopicSettings {
        let mut settings = defaults.clone();
        for (key, value) in &self.overrides {
            // A record written by another version may hold a key or value unknown here: the default stays.
            if let Ok(known) = find(key)
                && (known.set)(&mut settings, value).is_err()
            {
                continue;
            }
        }
        settings
    }

    /// Every setting in force, as text.
    #[must_use]
    pub fn describe(&self, defaults: &TopicSettings) -> BTreeMap<&'static str, String> {
        let settings = self.over(defaults);
        TOPIC_KEYS
            .iter()
            .map(|key| (key.name, (key.show)(&settings)))
            .collect()
    }
}

fn find(key: &str) -> Result<&'static TopicKey, TopicConfigError> {
    TOPIC_KEYS
        .iter()
        .find(|known| known.name == key)
        .ok_or_else(|| TopicConfigError::UnknownKey(key.to_owned()))
}

/// Sets a node's default of a topic setting.
pub(super) fn set_default(settings: &mut TopicSettings, key: &str, value: &str) -> Result<(), String> {
    let known = find(key).map_err(|error| error.to_string())?;
    (known.set)(settings, value)
}

/// -1 is unlimited.
fn limit(text: &str) -> Result<Option<u64>, String> {
    match i64::from_str(text) {
        Ok(-1) => Ok(None),
        Ok(value) if value >= 0 => Ok(Some(value.unsigned_abs())),
        _ => Err("expected a number of at least 0, or -1 for unlimited".to_owned()),
    }
}

fn show_limit(limit: Option<u64>) -> String {
    limit.map_or_else(|| "-1".to_owned(), |value| value.to_string())
}

fn within(text: &str, least: u64, most: u64) -> Result<u64, String> {
    super::keys::number(text, least, most)
}

fn timestamp_type(text: &str) -> Result<TimestampType, String> {
    match text {
        "CreateTime" => Ok(TimestampType::CreateTime),
        "LogAppendTime" => Ok(TimestampType::LogAppendTime),
        _ => Err("expected CreateTime or LogAppendTime".to_owned()),
    }
}

fn show_timestamp_type(kind: TimestampType) -> &'static str {
    match kind {
        TimestampType::CreateTime => "CreateTime",
        TimestampType::LogAppendTime => "LogAppendTime",
    }
}

fn durability(text: &str) -> Result<Durability, String> {
    match text {
        "sync" => Ok(Durability::Sync),
        "memory" => Ok(Durability::Memory),
        _ => Err("expected sync or memory".to_owned()),
    }
}

fn show_durability(durability: Durability) -> &'static str {
    match durability {
        Durability::Sync => "sync",
        Durability::Memory => "memory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_kafkas_grammar() {
        for good in ["a", "A.b_c-9", "...", &"x".repeat(249)] {
            assert_eq!(check_topic_name(good), Ok(()), "{good}");
        }
        assert_eq!(check_topic_name(""), Err(TopicNameError::Length(0)));
        assert_eq!(
            check_topic_name(&"x".repeat(250)),
            Err(TopicNameError::Length(250))
        );
        for dots in [".", ".."] {
            assert_eq!(check_topic_name(dots), Err(TopicNameError::Dots));
        }
        for bad in ["a/b", "a b", "ä", "a\0", "a,b"] {
            assert_eq!(check_topic_name(bad), Err(TopicNameError::Character), "{bad}");
        }
    }

    #[test]
    fn a_topic_keeps_only_what_was_set() {
        let mut config = TopicConfig::new([("retention.ms", "-1"), ("durability", "memory")]).unwrap();
        let defaults = TopicSettings {
            segment_bytes: 1 << 20,
            ..TopicSettings::default()
        };
        let settings = config.over(&defaults);
        assert_eq!(settings.retention_ms, None);
        assert_eq!(settings.segment_bytes, 1 << 20);
        assert!(settings.log().memory);
        assert_eq!(config.describe(&defaults)["retention.ms"], "-1");
        assert_eq!(config.describe(&defaults)["segment.bytes"], "1048576");
        assert_eq!(config.unset("durability"), Ok(true));
        assert_eq!(config.unset("durability"), Ok(false));
        assert!(!config.over(&defaults).log().memory);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(text, r#"{"retention.ms":"-1"}"#);
        assert_eq!(serde_json::from_str::<TopicConfig>(&text).unwrap(), config);
    }

    #[test]
    fn bad_settings_change_nothing() {
        let mut config = TopicConfig::default();
        for (key, value) in [
            ("retention.ms", "-2"),
            ("retention.bytes", "x"),
            ("segment.bytes", "1"),
            ("segment.bytes", "99999999999"),
            ("segment.ms", "0"),
            ("max.message.bytes", "0"),
            ("min.insync.replicas", "0"),
            ("message.timestamp.type", "createtime"),
            ("durability", "fsync"),
        ] {
            assert!(
                matches!(config.set(key, value), Err(TopicConfigError::BadValue { .. })),
                "{key}={value}"
            );
        }
        assert_eq!(
            config.set("nope", "1"),
            Err(TopicConfigError::UnknownKey("nope".into()))
        );
        assert_eq!(config, TopicConfig::default());
        assert!(matches!(
            TopicConfig::new([("segment.ms", "1"), ("segment.ms", "2")]),
            Err(TopicConfigError::Twice(_))
        ));
    }
}
