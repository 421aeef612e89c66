//! Embedded metadata store of a single node: one redb file in the data directory.
//!
//! A commit is synced before it returns (redb's immediate durability), so what a transaction promised survives a
//! kill and a power cut. Part of the shell in spirit: it does file I/O, on the control thread only.

use std::fs::File;
use std::path::Path;

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, TableError};
use rustix::fs::{FallocateFlags, fallocate};

use super::{Commit, MetadataError, MetadataStore, Transaction, Version, Versioned};

/// Key -> (version, value).
const RECORDS: TableDefinition<'_, &str, (u64, &[u8])> = TableDefinition::new("records");

/// One entry, "revision": raised by every transaction.
const COUNTERS: TableDefinition<'_, &str, u64> = TableDefinition::new("counters");
const REVISION: &str = "revision";

/// Metadata in a file of this node.
#[derive(Debug)]
pub struct Embedded {
    database: Database,
}

/// Least space kept allocated for the file.
const RESERVE: u64 = 4 << 20;

fn storage(error: impl std::fmt::Display) -> MetadataError {
    MetadataError::Storage(error.to_string())
}

impl Embedded {
    /// Opens the file, or makes it; repairs it when the last process was killed.
    ///
    /// # Errors
    /// When another process holds it, or it cannot be read or written.
    pub fn open(path: &Path) -> Result<Embedded, MetadataError> {
        reserve(path);
        let database = Database::create(path).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => MetadataError::InUse,
            other => storage(format!("{}: {other}", path.display())),
        })?;
        reserve(path);
        Ok(Embedded { database })
    }
}

/// Allocates the holes of the file and room for its growth, as far as there is space: a commit that meets a full disk
/// would end all later ones of this process, and a full disk must still let a node start and topics go. The length
/// stays as it is.
fn reserve(path: &Path) {
    let Ok(file) = File::options().write(true).open(path) else {
        return;
    };
    let wanted = file
        .metadata()
        .map_or(RESERVE, |meta| RESERVE.max(2 * meta.len()));
    if let Err(error) = fallocate(&file, FallocateFlags::KEEP_SIZE, 0, wanted) {
        tracing::warn!(%error, bytes = wanted, "no space could be kept for the metadata file");
    }
}

impl MetadataStore for Embedded {
    fn read(&self, key: &str) -> Result<Option<Versioned>, MetadataError> {
        let read = self.database.begin_read().map_err(storage)?;
        let table = match read.open_table(RECORDS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(None),
            Err(error) => return Err(storage(error)),
        };
        Ok(table
            .get(key)
            .map_err(storage)?
            .map(|entry| versioned(entry.value())))
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Versioned)>, MetadataError> {
        let read = self.database.begin_read().map_err(storage)?;
        let table = match read.open_table(RECORDS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            Err(error) => return Err(storage(error)),
        };
        let mut found = Vec::new();
        for entry in table.range(prefix..).map_err(storage)? {
            let (key, value) = entry.map_err(storage)?;
            if !key.value().starts_with(prefix) {
                break;
            }
            found.push((key.value().to_owned(), versioned(value.value())));
        }
        Ok(found)
    }

    fn commit(&mut self, transaction: Transaction) -> Result<Commit, MetadataError> {
        let write = self.database.begin_write().map_err(storage)?;
        let outcome = apply(&write, &transaction)?;
        match outcome {
            Commit::Applied(_) => write.commit().map_err(storage)?,
            Commit::Conflict { .. } => write.abort().map_err(storage)?,
        }
        Ok(outcome)
    }
}

fn versioned((version, value): (u64, &[u8])) -> Versioned {
    Versioned {
        version: Version(version),
        value: value.to_vec(),
    }
}

fn apply(write: &redb::WriteTransaction, transaction: &Transaction) -> Result<Commit, MetadataError> {
    let mut records = write.open_table(RECORDS).map_err(storage)?;
    for (key, wanted) in &transaction.guards {
        let present = records
            .get(key.as_str())
            .map_err(storage)?
            .map_or(Version(0), |entry| Version(entry.value().0));
        if present != *wanted {
            return Ok(Commit::Conflict { key: key.clone() });
        }
    }
    let mut counters = write.open_table(COUNTERS).map_err(storage)?;
    let last = counters
        .get(REVISION)
        .map_err(storage)?
        .map_or(0, |entry| entry.value());
    let revision = last + 1;
    counters.insert(REVISION, revision).map_err(storage)?;
    for (key, value) in &transaction.writes {
        match value {
            Some(value) => records
                .insert(key.as_str(), (revision, value.as_slice()))
                .map_err(storage)?,
            None => records.remove(key.as_str()).map_err(storage)?,
        };
    }
    Ok(Commit::Applied(Version(revision)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str, guard: u64, value: &str) -> Transaction {
        let mut transaction = Transaction::default();
        transaction.guard(key, Version(guard));
        transaction.put(key, value.into());
        transaction
    }

    #[test]
    fn guards_decide_and_a_refused_transaction_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Embedded::open(&dir.path().join("metadata.redb")).unwrap();
        assert_eq!(store.read("a").unwrap(), None);
        assert_eq!(store.list("").unwrap(), []);
        assert_eq!(
            store.commit(put("a", 0, "1")).unwrap(),
            Commit::Applied(Version(1))
        );
        let mut second = put("a", 0, "2");
        second.put("b", b"x".to_vec());
        assert_eq!(
            store.commit(second).unwrap(),
            Commit::Conflict { key: "a".into() }
        );
        assert_eq!(store.read("b").unwrap(), None);
        assert_eq!(
            store.commit(put("a", 1, "2")).unwrap(),
            Commit::Applied(Version(2))
        );
        assert_eq!(
            store.read("a").unwrap(),
            Some(Versioned {
                version: Version(2),
                value: b"2".to_vec()
            })
        );
        let mut removal = Transaction::default();
        removal.remove("a");
        assert_eq!(store.commit(removal).unwrap(), Commit::Applied(Version(3)));
        assert_eq!(store.read("a").unwrap(), None);
    }

    #[test]
    fn a_listing_holds_exactly_the_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Embedded::open(&dir.path().join("metadata.redb")).unwrap();
        for key in ["t/a", "t/b", "s", "t", "u"] {
            assert!(matches!(
                store.commit(put(key, 0, key)).unwrap(),
                Commit::Applied(_)
            ));
        }
        let keys: Vec<String> = store
            .list("t/")
            .unwrap()
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        assert_eq!(keys, ["t/a", "t/b"]);
    }

    /// The file as a SIGKILL leaves it is the file as it is while the store is still open.
    #[test]
    fn commits_survive_a_kill() {
        let dir = tempfile::tempdir().unwrap();
        let (live, left) = (dir.path().join("live.redb"), dir.path().join("left.redb"));
        let mut store = Embedded::open(&live).unwrap();
        for round in 0..20u64 {
            assert_eq!(
                store.commit(put("k", round, &round.to_string())).unwrap(),
                Commit::Applied(Version(round + 1))
            );
            std::fs::copy(&live, &left).unwrap();
            let mut reopened = Embedded::open(&left).unwrap();
            assert_eq!(
                reopened.read("k").unwrap().unwrap().value,
                round.to_string().as_bytes()
            );
            assert_eq!(
                reopened.commit(put("other", 0, "x")).unwrap(),
                Commit::Applied(Version(round + 2))
            );
        }
        assert_eq!(Embedded::open(&live).unwrap_err(), MetadataError::InUse);
    }
}
