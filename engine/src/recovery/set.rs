//! The journal set: which generation of journals is current, how many shards it has, and the term of this start.
//!
//! `journal-set` is replaced atomically (temporary name, sync, rename, directory sync). A new number of shards makes a
//! new generation: every old journal is replayed, each new shard gets a snapshot that carries all bytes which are in
//! no segment yet, everything is synced, and only then the set is switched. A crash before the switch does it again
//! from the untouched old generation.

use super::{Files, RecoverError, grain, journal_dir, replay_shard, ring};
use crate::canary::Canary;
use crate::config::StoreConfig;
use crate::io::buf::{AppendBuf, BufSlice};
use crate::io::{Disk, DiskError, DiskOp, Done, FileClass, FileId, OpenHow};
use crate::limits::BLOCK;
use crate::log::Log;
use crate::meta::JournalSet;
use crate::snapshot::{SnapshotHeader, decode_body, encode_entry, entry_seed};
use crate::store::Ops;
use crate::types::{Lsn, Now, ShardId, Term};

/// Path of the set's file.
pub const JOURNAL_SET: &str = "journal-set";
/// A file as long as the set: the next one is written over it, so that a full disk does not keep a node from starting.
const SPARE: &str = "journal-set.spare";
const PIECE: usize = 1 << 20;
/// Number of the first of the two snapshots that a new generation begins with.
const FIRST_NUMBER: u64 = 1;

/// Opens the journal set for a start with `shards` shards: raises the term durably, and makes a new generation when the
/// number of shards changed. `template` gives the sizes for journals to be made. What is returned is current on disk.
///
/// # Errors
/// [`RecoverError`] when the disk fails, the set is another node's, or an old journal cannot be replayed.
pub fn open_set(
    disk: &mut dyn Disk,
    template: &StoreConfig,
    shards: u16,
    now: Now,
) -> Result<JournalSet, RecoverError> {
    let mut files = Files {
        disk,
        ops: Ops::default(),
    };
    let found = read_set(&mut files)?;
    let node_id = template.node;
    let Some(old) = found else {
        // The set is durable before its first journal is made: journals without a set are not a new directory, and
        // a term counted from one again would let frames of earlier lives pass for newer ones.
        if !list(&mut files, "journal")?.is_empty() {
            let what = format!("{JOURNAL_SET} is missing although there are journals; put it back");
            return Err(RecoverError::Damaged { shard: 0, what });
        }
        let set = JournalSet {
            node_id,
            generation: 1,
            shards,
            term: Term(1),
        };
        write_set(&mut files, &set)?;
        return Ok(set);
    };
    if old.node_id != node_id {
        let path = JOURNAL_SET.to_owned();
        return Err(RecoverError::Foreign {
            path,
            node: old.node_id,
            shard: 0,
            generation: old.generation,
        });
    }
    let mut set = JournalSet {
        term: Term(old.term.0 + u64::from(!template.has(Canary::NoNewTerm))),
        ..old
    };
    write_set(&mut files, &set)?;
    remove_other_generations(&mut files, set.generation)?;
    if old.shards != shards {
        set = reshard(&mut files, template, &set, shards, now)?;
        remove_other_generations(&mut files, set.generation)?;
    }
    Ok(set)
}

fn read_set(files: &mut Files<'_>) -> Result<Option<JournalSet>, RecoverError> {
    let how = OpenHow {
        class: FileClass::Meta,
        create: false,
        write: true,
    };
    let Some((file, len)) = files.open(JOURNAL_SET, how)? else {
        return Ok(None);
    };
    files.one(JOURNAL_SET, DiskOp::Sync { file })?;
    let bytes = files.read(JOURNAL_SET, file, 0, len.min(BLOCK as u64))?;
    files.one(JOURNAL_SET, DiskOp::Close { file })?;
    files.ops.free_file(file);
    JournalSet::decode(&bytes)
        .map(Some)
        .map_err(|error| RecoverError::Damaged {
            shard: 0,
            what: format!("{JOURNAL_SET}: {error}"),
        })
}

fn write_set(files: &mut Files<'_>, set: &JournalSet) -> Result<(), RecoverError> {
    let temporary = format!("{JOURNAL_SET}.tmp");
    let rename = |from: &str, to: &str| DiskOp::Rename {
        from: from.to_owned(),
        to: to.to_owned(),
    };
    // Without a spare the file is made; that needs space.
    let _spare = files.disk.run(vec![rename(SPARE, &temporary)])?;
    write_whole(files, &temporary, &set.encode())?;
    files.one(JOURNAL_SET, rename(&temporary, JOURNAL_SET))?;
    files.one(".", DiskOp::SyncDir { path: ".".to_owned() })?;
    match write_whole(files, SPARE, &set.encode()) {
        Err(RecoverError::Disk {
            error: DiskError::NoSpace,
            ..
        }) => Ok(()),
        done => done,
    }
}

/// Writes a small file over whatever is there, and syncs it; not atomic.
fn write_whole(files: &mut Files<'_>, path: &str, bytes: &[u8]) -> Result<(), RecoverError> {
    let how = OpenHow {
        class: FileClass::Meta,
        create: true,
        write: true,
    };
    let Some((file, _)) = files.open(path, how)? else {
        return Ok(());
    };
    let write = DiskOp::Write {
        file,
        pos: 0,
        bufs: vec![BufSlice::copy_of(bytes)],
    };
    let len = bytes.len() as u64;
    let steps = [write, DiskOp::Resize { file, len }, DiskOp::Sync { file }];
    let written = steps
        .into_iter()
        .try_for_each(|step| files.one(path, step).map(drop));
    files.one(path, DiskOp::Close { file })?;
    files.ops.free_file(file);
    written
}

fn reshard(
    files: &mut Files<'_>,
    template: &StoreConfig,
    old: &JournalSet,
    shards: u16,
    now: Now,
) -> Result<JournalSet, RecoverError> {
    let new = JournalSet {
        generation: old.generation + 1,
        shards,
        ..*old
    };
    let config = |set: &JournalSet, shard: u16| StoreConfig {
        generation: set.generation,
        shard: ShardId(shard),
        term: set.term,
        ..template.clone()
    };
    let mut parts: Vec<Vec<Log>> = (0..shards).map(|_| Vec::new()).collect();
    for shard in 0..old.shards {
        let (_, replayed, snapshots) = replay_shard(files, config(old, shard), now)?;
        let open = replayed
            .resume
            .files
            .iter()
            .map(|f| f.file)
            .chain(snapshots.files);
        close_all(files, &journal_dir(old.generation, shard), open)?;
        for log in replayed.logs {
            parts[usize::from(log.id.shard(shards).0)].push(log);
        }
    }
    for (shard, logs) in parts.iter().enumerate() {
        make_shard(files, config(&new, shard as u16), logs)?;
    }
    write_set(files, &new)?;
    Ok(new)
}

fn close_all(
    files: &mut Files<'_>,
    path: &str,
    open: impl Iterator<Item = FileId>,
) -> Result<(), RecoverError> {
    for file in open {
        files.one(path, DiskOp::Close { file })?;
        files.ops.free_file(file);
    }
    Ok(())
}

/// Makes the journal of a shard whose first snapshot holds `logs`.
fn make_shard(files: &mut Files<'_>, cfg: StoreConfig, logs: &[Log]) -> Result<(), RecoverError> {
    let grain = grain(files.disk, &cfg);
    let dir = journal_dir(cfg.generation, cfg.shard.0);
    files.make_dirs(&dir)?;
    let (cfg, ring) = ring::open(files, cfg, grain)?;
    close_all(files, &dir, ring.files.iter().map(|f| f.file))?;
    // Two of them, as after every checkpoint: one may rot. They are read before the journals that they replace go: a
    // checkpoint that is not what was written leaves older ones and the journal behind, this one would leave nothing.
    let snapshots = [("checkpoint-a", FIRST_NUMBER), ("checkpoint-b", FIRST_NUMBER + 1)];
    for (name, number) in snapshots {
        write_snapshot(files, &cfg, &format!("{dir}/{name}"), number, logs)?;
    }
    for (name, number) in snapshots {
        check_snapshot(files, &cfg, &format!("{dir}/{name}"), number)?;
    }
    files.one(&dir, DiskOp::SyncDir { path: dir.clone() })?;
    Ok(())
}

/// Writes and syncs the snapshot of `logs` with all bytes that are in no segment yet.
fn write_snapshot(
    files: &mut Files<'_>,
    cfg: &StoreConfig,
    path: &str,
    number: u64,
    logs: &[Log],
) -> Result<(), RecoverError> {
    let mut body = Vec::new();
    let seed = entry_seed(cfg, number);
    logs.iter()
        .for_each(|log| encode_entry(log, seed, Lsn(0), true, &mut body));
    let header = SnapshotHeader {
        node: cfg.node,
        generation: cfg.generation,
        shard: cfg.shard.0,
        term: cfg.term,
        number,
        lsn: Lsn(0),
        count: logs.len() as u32,
        body_bytes: body.len() as u64,
        body_crc: crc32fast::hash(&body),
    };
    let how = OpenHow {
        class: FileClass::Checkpoint,
        create: true,
        write: true,
    };
    let Some((file, _)) = files.open(path, how)? else {
        return Ok(());
    };
    for (i, piece) in body.chunks(PIECE).enumerate() {
        let mut buf = AppendBuf::with_capacity(piece.len());
        buf.append(piece);
        buf.append_zeros(piece.len().next_multiple_of(BLOCK) - piece.len());
        let pos = (BLOCK + i * PIECE) as u64;
        files.one(
            path,
            DiskOp::Write {
                file,
                pos,
                bufs: vec![buf.freeze()],
            },
        )?;
    }
    files.one(
        path,
        DiskOp::Write {
            file,
            pos: 0,
            bufs: vec![header.encode()],
        },
    )?;
    files.one(path, DiskOp::Sync { file })?;
    files.one(path, DiskOp::Close { file })?;
    files.ops.free_file(file);
    Ok(())
}

/// Reads a snapshot that was just written, as the next start will.
fn check_snapshot(
    files: &mut Files<'_>,
    cfg: &StoreConfig,
    path: &str,
    number: u64,
) -> Result<(), RecoverError> {
    let how = OpenHow {
        class: FileClass::Checkpoint,
        create: false,
        write: false,
    };
    let Some((file, len)) = files.open(path, how)? else {
        return Err(not_as_written(cfg, path));
    };
    let block = files.read(path, file, 0, BLOCK as u64)?;
    let header = SnapshotHeader::decode(&block, len).ok();
    let body = match &header {
        Some(header) => files.read(path, file, BLOCK as u64, header.body_bytes)?,
        None => Vec::new(),
    };
    files.one(path, DiskOp::Close { file })?;
    files.ops.free_file(file);
    let good = |h: &SnapshotHeader| h.number == number && decode_body(h, &body, cfg).is_ok();
    match header.filter(good) {
        Some(_) => Ok(()),
        None => Err(not_as_written(cfg, path)),
    }
}

fn not_as_written(cfg: &StoreConfig, path: &str) -> RecoverError {
    RecoverError::Damaged {
        shard: cfg.shard.0,
        what: format!("{path} does not read as it was written; the journals before it are kept"),
    }
}

/// Removes generations that are not current: left from before a switch, or from one that was not finished.
fn remove_other_generations(files: &mut Files<'_>, current: u64) -> Result<(), RecoverError> {
    for name in list(files, "journal")? {
        if name.parse() == Ok(current) {
            continue;
        }
        let generation = format!("journal/{name}");
        for shard in list(files, &generation)? {
            let dir = format!("{generation}/{shard}");
            for file in list(files, &dir)? {
                let path = format!("{dir}/{file}");
                files.one(&path, DiskOp::Unlink { path: path.clone() })?;
            }
            files.one(&dir, DiskOp::RemoveDir { path: dir.clone() })?;
        }
        files.one(
            &generation,
            DiskOp::RemoveDir {
                path: generation.clone(),
            },
        )?;
    }
    Ok(())
}

fn list(files: &mut Files<'_>, path: &str) -> Result<Vec<String>, RecoverError> {
    match files
        .disk
        .run(vec![DiskOp::List {
            path: path.to_owned(),
        }])?
        .pop()
    {
        Some(Ok(Done::Listed(names))) => Ok(names.into_iter().map(|n| n.name).collect()),
        Some(Err(DiskError::NotFound)) | None => Ok(Vec::new()),
        Some(Err(error)) => Err(RecoverError::Disk {
            path: path.to_owned(),
            error,
        }),
        Some(Ok(_)) => Ok(Vec::new()),
    }
}
