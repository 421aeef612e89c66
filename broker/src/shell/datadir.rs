//! The data directory: one process at a time, the right node, the right cluster, the right format.
//!
//! The lock is an flock of the file `lock`, so it ends with the process however it ends. `node.meta` says whose
//! directory this is; a directory that holds anything else's data is refused, never adopted.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use ringfence_engine::meta::{MetaError, NodeMeta};
use ringfence_engine::recovery::JOURNAL_SET;
use thiserror::Error;

/// A process that was just killed holds its lock until the kernel is done with it.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(100);

const LOCK: &str = "lock";
const NODE_META: &str = "node.meta";
const METADATA: &str = "metadata.redb";

/// Why a data directory cannot be used.
#[derive(Debug, Error)]
pub enum DataDirError {
    #[error("data directory {path} is in use by another process; stop it, or name another --data-dir")]
    InUse { path: PathBuf },
    #[error("{what} {path}: {source}{}", hint(source))]
    Io {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{path} is not usable: {source}; restore it from a backup, or name another --data-dir")]
    Damaged { path: PathBuf, source: MetaError },
    #[error(
        "data directory {path} was written by format version {found}, this program reads {}; use the matching release",
        ringfence_engine::limits::FORMAT_VERSION
    )]
    OtherVersion { path: PathBuf, found: u32 },
    #[error(
        "data directory {path} belongs to node {found}, this is node {node}; check --node-id and --data-dir"
    )]
    OtherNode { path: PathBuf, node: u32, found: u32 },
    #[error("{path} belongs to another cluster than its directory; put the matching file back")]
    OtherCluster { path: PathBuf },
    #[error("{path} is missing although the directory holds data; put it back, or name another --data-dir")]
    Missing { path: PathBuf },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; give the user that runs ringfence read and write access",
        io::ErrorKind::ReadOnlyFilesystem => "; mount the file system writable",
        io::ErrorKind::StorageFull => "; free space first",
        _ => "",
    }
}

/// A data directory that this process holds.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// Locked while it is open.
    _lock: File,
}

impl DataDir {
    /// Makes the directory where it is missing and takes its lock.
    ///
    /// # Errors
    /// When another process holds it, or it cannot be made or written.
    pub fn open(path: &Path) -> Result<DataDir, DataDirError> {
        make_dirs(path)?;
        let path = path.canonicalize().map_err(io_error("cannot resolve", path))?;
        let file = path.join(LOCK);
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&file)
            .map_err(io_error("cannot open", &file))?;
        for attempt in 0.. {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if attempt < LOCK_TRIES => thread::sleep(LOCK_PAUSE),
                Err(TryLockError::WouldBlock) => return Err(DataDirError::InUse { path }),
                Err(TryLockError::Error(source)) => return Err(io_error("cannot lock", &file)(source)),
            }
        }
        Ok(DataDir { path, _lock: lock })
    }

    /// The directory, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The embedded metadata store's file.
    #[must_use]
    pub fn metadata(&self) -> PathBuf {
        self.path.join(METADATA)
    }

    /// Whose directory this is; `None` for a new one.
    ///
    /// # Errors
    /// When it is another node's or another format's, damaged, or holds data of no one.
    pub fn identity(&self, node: u32) -> Result<Option<NodeMeta>, DataDirError> {
        let Some(meta) = self.read(NODE_META, NodeMeta::decode)? else {
            return match ["journal", "logs", JOURNAL_SET]
                .iter()
                .any(|name| self.path.join(name).exists())
            {
                true => Err(DataDirError::Missing {
                    path: self.path.join(NODE_META),
                }),
                false => Ok(None),
            };
        };
        if meta.node_id != node {
            return Err(DataDirError::OtherNode {
                path: self.path.clone(),
                node,
                found: meta.node_id,
            });
        }
        Ok(Some(meta))
    }

    /// Marks a new directory as this node's.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_identity(&self, meta: &NodeMeta) -> Result<(), DataDirError> {
        self.replace(NODE_META, &meta.encode())
    }

    /// The metadata file does not match the directory.
    #[must_use]
    pub fn foreign_metadata(&self) -> DataDirError {
        DataDirError::OtherCluster {
            path: self.metadata(),
        }
    }

    /// The metadata file is gone although the directory is in use.
    #[must_use]
    pub fn lost_metadata(&self) -> DataDirError {
        DataDirError::Missing {
            path: self.metadata(),
        }
    }

    fn read<T>(
        &self,
        name: &str,
        decode: impl Fn(&[u8]) -> Result<T, MetaError>,
    ) -> Result<Option<T>, DataDirError> {
        let path = self.path.join(name);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(io_error("cannot read", &path)(source)),
        };
        match decode(&bytes) {
            Ok(value) => Ok(Some(value)),
            Err(MetaError::UnsupportedVersion { found }) => Err(DataDirError::OtherVersion {
                path: self.path.clone(),
                found,
            }),
            Err(source) => Err(DataDirError::Damaged { path, source }),
        }
    }

    /// Temp, fsync, rename, fsync of the directory (D4).
    fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), DataDirError> {
        let path = self.path.join(name);
        let temp = self.path.join(format!("{name}.tmp"));
        let write = || -> io::Result<()> {
            let mut file = File::create(&temp)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temp, &path)?;
            File::open(&self.path)?.sync_all()
        };
        write().map_err(io_error("cannot write", &path))
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DataDirError {
    let path = path.to_path_buf();
    move |source| DataDirError::Io { what, path, source }
}

/// Makes `path` and its missing parents; each new name is synced in its parent.
fn make_dirs(path: &Path) -> Result<(), DataDirError> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    make_dirs(parent)?;
    fs::create_dir(path).map_err(io_error("cannot make", path))?;
    File::open(parent)
        .and_then(|dir| dir.sync_all())
        .map_err(io_error("cannot sync", parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(node_id: u32) -> NodeMeta {
        NodeMeta {
            cluster_id: [1; 16],
            node_id,
            disk_id: [2; 16],
        }
    }

    #[test]
    fn a_new_directory_is_made_and_marked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let data = DataDir::open(&path).unwrap();
        assert_eq!(data.identity(1).unwrap(), None);
        data.set_identity(&meta(1)).unwrap();
        drop(data);
        let data = DataDir::open(&path).unwrap();
        assert_eq!(data.identity(1).unwrap(), Some(meta(1)));
    }

    #[test]
    fn only_one_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let _held = DataDir::open(dir.path()).unwrap();
        let error = DataDir::open(dir.path()).unwrap_err();
        assert!(matches!(error, DataDirError::InUse { .. }), "{error}");
    }

    #[test]
    fn foreign_and_damaged_directories_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(dir.path()).unwrap();
        data.set_identity(&meta(7)).unwrap();
        assert!(matches!(
            data.identity(1),
            Err(DataDirError::OtherNode {
                node: 1,
                found: 7,
                ..
            })
        ));
        let path = dir.path().join(NODE_META);
        let mut bytes = fs::read(&path).unwrap();
        bytes[20] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(matches!(data.identity(7), Err(DataDirError::Damaged { .. })));
        bytes[8] = 99;
        fs::write(&path, &bytes).unwrap();
        assert!(data.identity(7).is_err());
        fs::remove_file(&path).unwrap();
        fs::create_dir(dir.path().join("logs")).unwrap();
        assert!(matches!(data.identity(7), Err(DataDirError::Missing { .. })));
    }
}
