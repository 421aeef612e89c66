//! Start-up of one shard: from snapshot and journal to a store that may serve.
//!
//! Order (STORAGE.md section 5): every journal file and snapshot is synced before it is read, so that no decision rests
//! on a device cache; the newest valid snapshot; then frames from its lsn, applied to memory only; a bad frame is
//! judged by the highest durable_lsn that later frames promise (torn tail: cut; below a promise: damage, fenced to
//! named offsets); a `Start` frame of the new term is durable at the cut before anything is served. No segment is
//! opened: files open on first use.

mod replay;
mod ring;
mod set;

use thiserror::Error;

use crate::canary::Canary;
use crate::checkpoint::Checkpointer;
use crate::commit::{Commit, Effect};
use crate::config::{ConfigError, StoreConfig};
use crate::io::{DirEntry, Disk, DiskError, DiskGone, DiskOp, Done, FileClass, FileId, OpenHow};
use crate::journal::{Body, Record};
use crate::limits::BLOCK;
use crate::log::Log;
use crate::removal::DELETE_SUFFIX;
use crate::snapshot::{Entry, SnapshotHeader, decode_body};
use crate::store::{Ops, Pending, Store};
use crate::types::{Lsn, Now, PartitionId, Term};

pub(crate) use replay::Replayed;
pub use set::{JOURNAL_SET, open_set};

/// What recovery found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// The journal was made by this start.
    pub fresh: bool,
    /// Number of the snapshot used (0: none).
    pub snapshot: u64,
    /// The newer snapshot was not usable.
    pub older_snapshot: bool,
    /// Frames replayed and their bytes.
    pub frames: u64,
    pub bytes: u64,
    /// Partitions known.
    pub partitions: usize,
    /// Where the journal was cut, and whether a torn frame was found there.
    pub cut: Lsn,
    pub torn: bool,
    /// Bad frames below a promised durable end.
    pub damaged_frames: u64,
    /// Partitions fenced because of them.
    pub fenced: usize,
}

/// Why a shard cannot start. Nothing was changed that a later start would miss.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RecoverError {
    #[error(transparent)]
    Gone(#[from] DiskGone),
    #[error("{path}: {error}")]
    Disk { path: String, error: DiskError },
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Files of another node, shard or generation.
    #[error("{path} belongs to node {node}, shard {shard}, generation {generation}; this is not our journal")]
    Foreign {
        path: String,
        node: u32,
        shard: u16,
        generation: u64,
    },
    /// The journal's promises cannot be met: starting would lose acknowledged records silently.
    #[error("the journal of shard {shard} is damaged: {what}")]
    Damaged { shard: u16, what: String },
}

/// Directory of a shard's journal.
#[must_use]
pub fn journal_dir(generation: u64, shard: u16) -> String {
    format!("journal/{generation}/{shard}")
}

/// A disk, with errors that name the path.
pub(crate) struct Files<'a> {
    pub(crate) disk: &'a mut dyn Disk,
    pub(crate) ops: Ops,
}

impl Files<'_> {
    /// Runs operations together; the first failure is the result.
    pub(crate) fn all(&mut self, path: &str, ops: Vec<DiskOp>) -> Result<Vec<Done>, RecoverError> {
        let named = |error| RecoverError::Disk {
            path: path.to_owned(),
            error,
        };
        self.disk
            .run(ops)?
            .into_iter()
            .map(|result| result.map_err(named))
            .collect()
    }

    pub(crate) fn one(&mut self, path: &str, op: DiskOp) -> Result<Done, RecoverError> {
        let mut done = self.all(path, vec![op])?;
        Ok(done.pop().unwrap_or(Done::Ok))
    }

    /// Makes a directory when it is missing; whether it was made.
    pub(crate) fn make_dir(&mut self, path: &str) -> Result<bool, RecoverError> {
        let result = self
            .disk
            .run(vec![DiskOp::MakeDir {
                path: path.to_owned(),
            }])?
            .pop();
        match result {
            Some(Err(DiskError::Exists)) => Ok(false),
            Some(Err(error)) => Err(RecoverError::Disk {
                path: path.to_owned(),
                error,
            }),
            _ => Ok(true),
        }
    }

    /// Makes every directory on the way to `path`, durable in its parent.
    pub(crate) fn make_dirs(&mut self, path: &str) -> Result<(), RecoverError> {
        let mut parent = String::new();
        for part in path.split('/') {
            let dir = if parent.is_empty() {
                part.to_owned()
            } else {
                format!("{parent}/{part}")
            };
            self.make_dir(&dir)?;
            let synced = if parent.is_empty() {
                ".".to_owned()
            } else {
                parent.clone()
            };
            self.one(&synced, DiskOp::SyncDir { path: synced.clone() })?;
            parent = dir;
        }
        Ok(())
    }

    /// Opens a file; `None` when it is missing and not to be created.
    pub(crate) fn open(&mut self, path: &str, how: OpenHow) -> Result<Option<(FileId, u64)>, RecoverError> {
        let file = self.ops.file();
        let open = DiskOp::Open {
            file,
            path: path.to_owned(),
            how,
        };
        match self.disk.run(vec![open])?.pop() {
            Some(Ok(Done::Opened { len })) => Ok(Some((file, len))),
            Some(Err(DiskError::NotFound)) if !how.create => {
                self.ops.free_file(file);
                Ok(None)
            }
            Some(Err(error)) => Err(RecoverError::Disk {
                path: path.to_owned(),
                error,
            }),
            _ => Err(RecoverError::Gone(DiskGone("an open without an answer".into()))),
        }
    }

    /// Reads `len` bytes at `pos` in pieces that run together; stops short at the end of the file.
    pub(crate) fn read(
        &mut self,
        path: &str,
        file: FileId,
        pos: u64,
        len: u64,
    ) -> Result<Vec<u8>, RecoverError> {
        const PIECE: u64 = 2 << 20;
        let ops = (0..len.div_ceil(PIECE))
            .map(|i| {
                let at = i * PIECE;
                let piece = PIECE.min(len - at).next_multiple_of(BLOCK as u64);
                DiskOp::Read {
                    file,
                    pos: pos + at,
                    len: piece as usize,
                }
            })
            .collect();
        let mut bytes = Vec::with_capacity(len as usize);
        for done in self.all(path, ops)? {
            if let Done::Read(piece) = done {
                bytes.extend_from_slice(&piece);
            }
        }
        bytes.truncate(len as usize);
        Ok(bytes)
    }
}

/// The snapshots of a shard.
pub(crate) struct Snapshots {
    files: [FileId; 2],
    lens: [u64; 2],
    /// Index of the newest valid one.
    newest: usize,
    number: u64,
    /// Term of the life that wrote it: no frame from its lsn on that counts is of an earlier one.
    pub(crate) term: Term,
    pub(crate) lsn: Lsn,
    /// lsn of the older one while it looks valid: the journal is kept from there on.
    pub(crate) keep: Lsn,
    pub(crate) entries: Vec<Entry>,
    pub(crate) older_used: bool,
}

fn open_snapshots(files: &mut Files<'_>, cfg: &StoreConfig) -> Result<Snapshots, RecoverError> {
    let dir = journal_dir(cfg.generation, cfg.shard.0);
    let how = OpenHow {
        class: FileClass::Checkpoint,
        create: true,
        write: true,
    };
    let mut snapshots = Snapshots {
        files: [FileId(0); 2],
        lens: [0; 2],
        newest: 0,
        number: 0,
        term: Term(0),
        lsn: Lsn(0),
        keep: Lsn(0),
        entries: Vec::new(),
        older_used: false,
    };
    let mut headers = Vec::new();
    for (slot, name) in ["checkpoint-a", "checkpoint-b"].into_iter().enumerate() {
        let path = format!("{dir}/{name}");
        let Some((file, len)) = files.open(&path, how)? else {
            continue;
        };
        files.one(&path, DiskOp::Sync { file })?;
        (snapshots.files[slot], snapshots.lens[slot]) = (file, len);
        let block = files.read(&path, file, 0, (BLOCK as u64).min(len))?;
        if let Ok(header) = SnapshotHeader::decode(&block, len) {
            check_owner(cfg, &path, header.node, header.shard, header.generation)?;
            headers.push((slot, path, header));
        }
    }
    headers.sort_by_key(|(_, _, header)| std::cmp::Reverse(header.number));
    let oldest = headers.last().map(|(_, _, header)| header.lsn);
    for (slot, path, header) in headers {
        let body = files.read(&path, snapshots.files[slot], BLOCK as u64, header.body_bytes)?;
        match decode_body(&header, &body, cfg) {
            Ok(entries) => {
                (snapshots.newest, snapshots.number, snapshots.lsn) = (slot, header.number, header.lsn);
                snapshots.term = header.term;
                snapshots.keep = oldest.unwrap_or(header.lsn).min(header.lsn);
                snapshots.entries = entries;
                return Ok(snapshots);
            }
            Err(error) => {
                tracing::warn!(%path, "snapshot is not usable: {error}");
                snapshots.older_used = true;
            }
        }
    }
    Ok(snapshots)
}

pub(crate) fn check_owner(
    cfg: &StoreConfig,
    path: &str,
    node: u32,
    shard: u16,
    generation: u64,
) -> Result<(), RecoverError> {
    if (node, shard, generation) == (cfg.node, cfg.shard.0, cfg.generation) {
        Ok(())
    } else {
        Err(RecoverError::Foreign {
            path: path.to_owned(),
            node,
            shard,
            generation,
        })
    }
}

impl Store {
    /// Recovers the shard named by `cfg` from `disk`, or makes its journal.
    ///
    /// # Errors
    /// [`RecoverError`] when the disk fails or the journal cannot keep its promises.
    pub fn recover(
        disk: &mut dyn Disk,
        cfg: StoreConfig,
        now: Now,
    ) -> Result<(Store, RecoveryReport), RecoverError> {
        let grain = grain(disk, &cfg);
        let mut files = Files {
            disk,
            ops: Ops::default(),
        };
        let (cfg, replayed, snapshots) = replay_shard(&mut files, cfg, now)?;
        let Replayed {
            logs,
            dropped,
            resume,
            mut report,
            checkpoint_lsn,
        } = replayed;
        let doomed = set_dropped_aside(&mut files, &cfg, &dropped)?;
        report.partitions = logs.len();
        report.fenced = logs.iter().filter(|log| log.fenced.is_some()).count();
        let commit = Commit::new(&cfg, grain, checkpoint_lsn, resume);
        let checkpoint = Checkpointer::new(
            snapshots.files,
            snapshots.lens.map(|len| len / BLOCK as u64 * BLOCK as u64),
            snapshots.newest,
            snapshots.number,
            snapshots.lsn,
        );
        let Files { disk, ops } = files;
        let mut store = Store::assemble(cfg, grain, commit, ops, checkpoint);
        for log in logs {
            store.adopt(log);
        }
        let not_before = now.after_ms(store.cfg.delete_delay_ms);
        doomed
            .into_iter()
            .for_each(|path| store.doom(path, true, not_before));
        store.write_start(disk, now)?;
        Ok((store, report))
    }

    fn adopt(&mut self, log: Log) {
        self.write_back.dirty += log.counted_dirty();
        self.write_back.memory += log.memory();
        let leftovers = log.leftovers;
        let no = self.add_log(log);
        if leftovers {
            self.removal.leftovers.push(no);
        }
        self.queue_write_back(no);
    }

    /// Makes `Start{term}` durable at the cut: from here on frames of earlier lives cannot be taken for ours.
    fn write_start(&mut self, disk: &mut dyn Disk, now: Now) -> Result<(), RecoverError> {
        let start = Record::Start { term: self.cfg.term };
        self.commit.push(now, start, Body::None, Effect::None);
        let mut issued = Vec::new();
        let ops = &mut self.ops;
        // Nobody comes to share the frame, so the linger is over at once.
        let lingered = Now {
            mono: now.mono.saturating_add(self.cfg.linger_ns),
            ..now
        };
        self.commit
            .issue(lingered, &mut || ops.id(Pending::Journal), &mut issued);
        let (ids, disk_ops): (Vec<_>, Vec<_>) = issued.into_iter().unzip();
        let results = disk.run(disk_ops)?;
        let mut effects = Vec::new();
        for (op, result) in ids.into_iter().zip(results) {
            let path = journal_dir(self.cfg.generation, self.cfg.shard.0);
            result.map_err(|error| RecoverError::Disk { path, error })?;
            self.ops.forget(op);
            self.commit.completed(now, op, true, &mut effects);
        }
        if self.commit.is_idle() {
            Ok(())
        } else {
            let what = "no room for the start frame: every journal file is in use".to_owned();
            Err(RecoverError::Damaged {
                shard: self.cfg.shard.0,
                what,
            })
        }
    }
}

/// Sets the directories of replayed drops aside, which a crash may have left under their names. Returns what is to be
/// removed: those, and (shard 0 for all) directories that earlier lives set aside.
fn set_dropped_aside(
    files: &mut Files<'_>,
    cfg: &StoreConfig,
    dropped: &[PartitionId],
) -> Result<Vec<String>, RecoverError> {
    let mut doomed = Vec::new();
    if cfg.shard.0 == 0
        && let Done::Listed(names) = files.one("logs", DiskOp::List { path: "logs".into() })?
    {
        let gone = |n: &&DirEntry| n.is_dir && n.name.ends_with(DELETE_SUFFIX);
        doomed.extend(names.iter().filter(gone).map(|n| format!("logs/{}", n.name)));
    }
    for id in dropped {
        let from = format!("logs/{}", id.dir_name());
        // Numbers from 1 on are given by the running store; 0 is this start's.
        let to = format!("{from}.{}.0{DELETE_SUFFIX}", cfg.term);
        let rename = DiskOp::Rename {
            from: from.clone(),
            to: to.clone(),
        };
        match files.disk.run(vec![rename])?.pop() {
            Some(Err(DiskError::NotFound)) | None => {}
            Some(Err(error)) => return Err(RecoverError::Disk { path: from, error }),
            Some(Ok(_)) => doomed.push(to),
        }
    }
    Ok(doomed)
}

/// What frames are multiples of: no two of them share a block that the device writes as one.
fn grain(disk: &dyn Disk, cfg: &StoreConfig) -> usize {
    if cfg.has(Canary::SmallGrain) {
        BLOCK
    } else {
        disk.grain()
    }
}

/// Replays a shard's snapshot and journal into memory; makes the journal when there is none.
pub(crate) fn replay_shard(
    files: &mut Files<'_>,
    cfg: StoreConfig,
    now: Now,
) -> Result<(StoreConfig, Replayed, Snapshots), RecoverError> {
    let grain = grain(files.disk, &cfg);
    let dir = journal_dir(cfg.generation, cfg.shard.0);
    files.make_dirs(&dir)?;
    files.make_dirs("logs")?;
    let (cfg, ring) = ring::open(files, cfg, grain)?;
    cfg.check(grain)?;
    let mut snapshots = open_snapshots(files, &cfg)?;
    if !cfg.has(Canary::NoDirectorySync) {
        files.one(&dir, DiskOp::SyncDir { path: dir.clone() })?;
    }
    let entries = std::mem::take(&mut snapshots.entries);
    let replayed = replay::run(files, &cfg, grain, ring, &snapshots, entries, now)?;
    Ok((cfg, replayed, snapshots))
}
