// SPDX-License-Identifier: Apache-2.0

package rundir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/desired"
)

// Configuration tells which configuration a running process uses.
type Configuration struct {
	File string    `json:"file"` // the absolute path
	Read time.Time `json:"read"` // when the configuration in force was read
	// Overrides are the overrides in force.
	Overrides []desired.Override `json:"overrides,omitempty"`
	// InvalidOverrides are the overrides that the process leaves out.
	InvalidOverrides []InvalidOverride `json:"invalid_overrides,omitempty"`
	// Store is the condition of the connection to the store of a balancer's fleet. It is nil
	// without a store.
	Store *Store `json:"store,omitempty"`
	// Refused describes the last reload if it failed. It is nil if the last reload succeeded or
	// there was none.
	Refused *Refusal `json:"refused"`
	// Unchecked is the last health check that the host of a balancer could not make. It is nil if
	// there was none.
	Unchecked *Unchecked `json:"unchecked,omitempty"`
	// Unsaved tells why a balancer cannot write to its state directory. It is empty if it can.
	Unsaved string `json:"unsaved,omitempty"`
	// Reasons tell why servers of a balancer are unfit for new flows. The tables of the data path have
	// only the conditions.
	Reasons []ServerReason `json:"reasons,omitempty"`
}

// ServerReason is why a server has a condition.
type ServerReason struct {
	Service   string `json:"service"`
	Server    string `json:"server"`
	Condition string `json:"condition"` // such as failing
	Reason    string `json:"reason"`    // as in the log
}

// InvalidOverride is an override that a process leaves out. It has no service if the file of
// overrides as a whole cannot be read.
type InvalidOverride struct {
	desired.Override
	Problems []string `json:"problems"` // the texts of the log
}

// Unchecked is a health check that the host could not make.
type Unchecked struct {
	Time   time.Time `json:"time"`
	Reason string    `json:"reason"` // as in the log
}

// Store is the condition of a connection to a store.
type Store struct {
	Version  string   `json:"version"`  // the version that the balancer follows
	Problems []string `json:"problems"` // for an operator, the gravest first
}

// Refusal is a reload that failed and changed nothing.
type Refusal struct {
	Time     time.Time `json:"time"`
	Problems []string  `json:"problems"` // the texts of the log
}

// Record describes a running process, in a file beside its lock.
type Record struct {
	// Since is the time at which the process took over the instance, as in Process.Since. It
	// identifies the process: a killed process leaves its record, which does not describe the next
	// process.
	Since         time.Time         `json:"process"`
	Role          string            `json:"role"` // balancer or agent
	Configuration Configuration     `json:"configuration"`
	Fixed         []desired.Setting `json:"fixed"` // the settings that only a restart can change
	// Switch is the switch in front of a balancer; nil: there is none.
	Switch *desired.Switch `json:"switch,omitempty"`
}

// RecordFile returns the path of an instance's record. The file exists while the instance's process
// runs, and after the process was killed.
func RecordFile(instance string) string { return recordFile(LockFile(instance)) }

// recordFile returns the path of the record that belongs to a lock.
func recordFile(lockFile string) string {
	return strings.TrimSuffix(lockFile, lockSuffix) + ".json"
}

// FindRecord returns the record of the process that runs an instance. It returns nil if process is
// nil, or if the process has written no record.
func FindRecord(instance string, process *Process) (*Record, error) {
	record, err := readRecord(RecordFile(instance), process)
	if err != nil {
		return nil, fmt.Errorf("read the record of the process of instance %q: %w", instance, err)
	}
	return record, nil
}

// readRecord reads the record of a process. It returns nil if there is none of this process.
func readRecord(path string, process *Process) (*Record, error) {
	if process == nil {
		return nil, nil
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	record, err := parseRecord(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if !record.Since.Equal(process.Since) { // it is the record of an earlier process
		return nil, nil
	}
	return record, nil
}

func parseRecord(data []byte) (*Record, error) {
	var record Record
	if err := json.Unmarshal(data, &record); err != nil {
		return nil, err
	}
	return &record, nil
}

// Recorder keeps the record of a process. Several goroutines may use it. If it cannot write the
// record, it logs the error, and the process continues.
type Recorder struct {
	log  *slog.Logger
	path string

	mu     sync.Mutex
	record Record
}

// NewRecorder returns the recorder of a process, and writes the record. The process must hold the
// lock of the instance, and have just read the configuration file.
func NewRecorder(
	lock *os.File, role, file string, fixed []desired.Setting, log *slog.Logger,
) *Recorder {
	r := &Recorder{log: log, path: recordFile(lock.Name())}
	if absolute, err := filepath.Abs(file); err == nil {
		file = absolute
	}
	r.record.Configuration = Configuration{File: file, Read: time.Now()}
	r.record.Role, r.record.Fixed = role, fixed
	info, err := lock.Stat()
	if err != nil {
		log.Warn("status cannot show the configuration", "error", err)
		return r
	}
	r.record.Since = info.ModTime()
	r.write()
	return r
}

// TrackReloads returns a function that calls reload and records the result.
func (r *Recorder) TrackReloads(reload func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		now := time.Now()
		err := reload(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		if err != nil {
			r.record.Configuration.Refused = &Refusal{now, strings.Split(err.Error(), "\n")}
		} else {
			r.record.Configuration.Read, r.record.Configuration.Refused = now, nil
		}
		r.write()
		return err
	}
}

// SetOverrides records the overrides in force, and those that are left out.
func (r *Recorder) SetOverrides(inForce []desired.Override, invalid []desired.InvalidOverride) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record.Configuration.Overrides, r.record.Configuration.InvalidOverrides = inForce, nil
	for _, o := range invalid {
		r.record.Configuration.InvalidOverrides = append(r.record.Configuration.InvalidOverrides,
			InvalidOverride{o.Override, o.Texts()})
	}
	r.write()
}

// SetStore records the condition of the connection to a store.
func (r *Recorder) SetStore(store Store) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record.Configuration.Store = &store
	r.write()
}

// SetSwitch records the switch in front of the balancer.
func (r *Recorder) SetSwitch(to *desired.Switch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record.Switch = to
	r.write()
}

// SetUnchecked records that the host could not make a health check just now, and why.
func (r *Recorder) SetUnchecked(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record.Configuration.Unchecked = &Unchecked{time.Now(), reason}
	r.write()
}

// SetUnsaved records why the process cannot write to its state directory. An empty problem means
// that it can.
func (r *Recorder) SetUnsaved(problem string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record.Configuration.Unsaved = problem
	r.write()
}

// SetReasons records why servers are unfit for new flows.
func (r *Recorder) SetReasons(reasons []ServerReason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record.Configuration.Reasons = reasons
	r.write()
}

// Close removes the record.
func (r *Recorder) Close() error {
	if err := os.Remove(r.path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// write writes the record in place of the earlier one, and logs an error.
func (r *Recorder) write() {
	if err := r.replace(); err != nil {
		r.log.Warn("status cannot show the configuration", "error", err)
	}
}

// replace replaces the file atomically, so that readers see the earlier record or the new one. Only
// root may read the file, because it contains the seed.
func (r *Recorder) replace() error {
	data, err := json.Marshal(&r.record)
	if err != nil {
		return err
	}
	return atomicfile.Write(r.path, data, 0o600)
}
