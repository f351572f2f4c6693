// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/rundir"
)

// foreground has the values that all commands in the foreground need.
type foreground struct {
	hangups <-chan os.Signal
	// hidesPins tells whether the data path ends with the process. It is the result of
	// datapath.HidesPins before the start. The start mounts the BPF file system, so a later call could
	// return something else.
	hidesPins bool
	log       *slog.Logger
}

// detachCommand returns the command with which an operator detaches the data path after the process
// has ended. It is empty if the data path ends with the process.
func (f *foreground) detachCommand(role, instance string) string {
	if f.hidesPins {
		return ""
	}
	return "segue " + role + " detach " + instance
}

// runDaemon runs a command in the foreground. It catches SIGHUP first, because a SIGHUP during the
// start would otherwise end the process.
func runDaemon(cmd *cobra.Command, run func(context.Context, *foreground) error) error {
	hangups, stop := daemon.CatchHangups()
	defer stop()
	format, _ := cmd.Flags().GetString(logFormat)
	log, err := newLog(cmd.ErrOrStderr(), format)
	if err != nil {
		return err
	}
	hidesPins := datapath.HidesPins()
	if hidesPins {
		log.Warn("/sys/fs/bpf is private to this process, as under ip netns exec: the data path ends with " +
			"the process, and segue status cannot see it; use nsenter --net= instead")
	}
	return run(cmd.Context(), &foreground{hangups, hidesPins, log})
}

// logFormat is the name of the flag for the format of the log.
const logFormat = "log-format"

// logFlag adds the flag for the format of the log.
func logFlag(cmd *cobra.Command) {
	cmd.Flags().String(logFormat, "text", "`format` of the log: text or json")
	_ = cmd.RegisterFlagCompletionFunc(logFormat,
		cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
}

// newLog returns a log in the format text or json. Both formats show a value as the same text: a
// duration in JSON is "10s", not a number of nanoseconds.
func newLog(out io.Writer, format string) (*slog.Logger, error) {
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(out, nil)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(out, &slog.HandlerOptions{ReplaceAttr: textOf})), nil
	}
	return nil, fmt.Errorf("--%s %q: must be text or json", logFormat, format)
}

// textOf replaces a value by its text if the JSON handler would not show this text.
func textOf(_ []string, a slog.Attr) slog.Attr {
	switch value := a.Value.Any().(type) {
	case time.Time, slog.Level, error: // the handler shows them as text already
	case fmt.Stringer:
		a.Value = slog.StringValue(value.String())
	}
	return a
}

// lockInstance locks an instance for a process that will run it. If another process runs the
// instance, the error says how to run a second instance.
func lockInstance(name string) (*os.File, error) {
	lock, err := rundir.Lock(name)
	if errors.Is(err, rundir.ErrRunning) {
		err = fmt.Errorf("%w; another instance on this host needs another node.instance", err)
	}
	return lock, err
}

// unlockInstance unlocks an instance. Usually the lock file stays, and detaching the instance
// removes it. If the instance has no data path, because its first start failed, nobody would detach
// it. Then unlockInstance removes the file. This is safe while the file is locked: see rundir.Lock.
func unlockInstance(lock *os.File, instance string) {
	if _, err := os.Lstat(datapath.Dir(instance)); errors.Is(err, os.ErrNotExist) {
		_ = rundir.Unlock(lock) // closes the lock even if it fails
		return
	}
	_ = lock.Close()
}

// removeLeft removes temporary files that earlier processes of an instance have left, because they
// died while they replaced one of the files. It skips empty names. The caller holds the lock of the
// instance.
func removeLeft(log *slog.Logger, files ...string) {
	for _, file := range files {
		if file == "" {
			continue
		}
		if err := atomicfile.RemoveLeft(file); err != nil {
			log.Warn("a temporary file of an earlier process stays", "file", file, "error", err)
		}
	}
}

// logWarnings logs the warnings about a configuration.
func logWarnings(log *slog.Logger, warnings fieldpath.Errors) {
	for _, warning := range warnings {
		log.Warn("configuration", "warning", warning)
	}
}

// logInvalid logs the overrides that a start leaves out.
func logInvalid(log *slog.Logger, invalid []desired.InvalidOverride) {
	for _, o := range invalid {
		for _, problem := range o.Texts() {
			log.Error("an override is LEFT OUT, because it is invalid with the configuration file",
				"override", describeInvalid(&o.Override), "error", problem)
		}
	}
}

// tracked returns a reload that also puts its result into the metrics and the record of the
// process. It publishes an error as an event, and logs warnings.
func tracked(
	metrics *daemon.Metrics, recorder *rundir.Recorder, stream *events.Stream, log *slog.Logger,
	reload api.Reload,
) api.Reload {
	return func(ctx context.Context) (warnings fieldpath.Errors, err error) {
		reloadOnly := func(ctx context.Context) (err error) {
			warnings, err = reload(ctx)
			return err
		}
		if err := metrics.TrackReloads(recorder.TrackReloads(reloadOnly))(ctx); err != nil {
			stream.Publish(events.Event{Kind: events.ReloadRefused, By: events.ActorOf(ctx), Reason: err.Error()})
			return nil, err
		}
		logWarnings(log, warnings)
		return warnings, nil
	}
}

// reloadBySignal returns a reload for SIGHUP, with the signal as the actor of its changes. It drops
// the warnings, because reload has logged them.
func reloadBySignal(reload api.Reload) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := reload(events.WithActor(ctx, func() string { return events.Signal }))
		return err
	}
}
