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

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/wording"
)

func newStore() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "store status|confirm|import|export",
		Short: "Use the store that a fleet of balancers shares",
		Long: `Use the store that a fleet of balancers shares. The section store of each balancer's
configuration file names it. Status and confirm speak with the balancer on this host. Import
and export speak with the store itself, so they need no balancer.`,
	}
	cmd.AddCommand(newStoreStatus(), newStoreConfirm(), newStoreImport(), newStoreExport())
	return cmd
}

func newStoreStatus() *cobra.Command {
	var instance string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether the balancer on this host follows the store",
		Long: `Show whether the balancer on this host follows the store. The exit code is 1 if the store
does not answer, or if the balancer does not follow it. --json prints the answer of the API to
GET /v1/store.`,
		Example: "  segue store status",
		Args:    cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := balancerOn(cmd.Context(), instance)
			if err != nil {
				return err
			}
			state, err := client.Store(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return errors.Join(cli.PrintJSON(cmd.OutOrStdout(), state), requireFollowing(state))
			}
			return printStore(cmd.OutOrStdout(), state)
		},
	}
	instanceFlag(cmd, &instance)
	cli.JSONFlag(cmd, &asJSON)
	return cmd
}

// errNotFollowing makes status fail after it has printed the reason.
var errNotFollowing = errors.New("the balancer does not follow the store")

// printStore prints the condition of the store. It returns an error if the balancer does not follow
// the store.
func printStore(out io.Writer, s *api.Store) error {
	origin := ""
	if s.FromCache {
		origin = ", from the balancer's own file"
	}
	fmt.Fprintf(out, "follows: %s%s\n", orNone(s.Follows), origin)
	fmt.Fprintf(out, "newest:  %s\n", orNone(s.Newest))
	fmt.Fprintf(out, "leader:  %s\n", orNone(s.Leader))
	for _, problem := range problemsOf(s) {
		fmt.Fprintln(out, problem)
	}
	return requireFollowing(s)
}

// requireFollowing returns an error unless the balancer follows the store.
func requireFollowing(s *api.Store) error {
	if s.Held != "" || !s.Reachable {
		return errNotFollowing
	}
	return nil
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}

// problemsOf returns a line for each problem with the store, the gravest first.
func problemsOf(s *api.Store) (problems []string) {
	if s.Held != "" {
		problems = append(problems, "NOT FOLLOWED: "+s.Held)
	}
	if !s.Reachable {
		does := "continues with its last state"
		if s.Follows == "" {
			does = "waits for its services"
		}
		problems = append(problems, fmt.Sprintf("NOT REACHABLE since %s, the balancer %s: %s",
			s.Since.Format(time.RFC3339), does, s.Problem))
	}
	if s.Unsaved != "" {
		problems = append(problems,
			"NOT SAVED, a restart without the store would use an older state: "+s.Unsaved)
	}
	return problems
}

func newStoreConfirm() *cobra.Command {
	var instance string
	cmd := &cobra.Command{
		Use:   "confirm VERSION",
		Short: "Follow a version although it removes more servers than the limit allows",
		Long: `Make the balancer on this host follow a version of the store although this version removes
more servers than store.max-removed-percent allows. "segue store status" shows the version,
and how many servers it would remove. If the store has got another version since, confirm
changes nothing. A confirmation holds once, and only for this balancer.`,
		Example: "  segue store status\n  segue store confirm 3esnfahqxufb-8",
		Args:    cli.Arguments("VERSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := balancerOn(cmd.Context(), instance)
			if err != nil {
				return err
			}
			state, err := client.ConfirmStore(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return printStore(cmd.OutOrStdout(), state)
		},
	}
	cmd.ValidArgsFunction = func(
		cmd *cobra.Command, args []string, _ string,
	) ([]string, cobra.ShellCompDirective) {
		return confirmable(cmd.Context(), instance, args), cobra.ShellCompDirectiveNoFileComp
	}
	instanceFlag(cmd, &instance)
	return cmd
}

// confirmable returns the version that can be confirmed, for shell completion.
func confirmable(ctx context.Context, instance string, args []string) []string {
	client, err := clientOf(instance)
	if err != nil || len(args) > 0 {
		return nil
	}
	state, err := client.Store(ctx)
	if err != nil || state.Confirmable == "" {
		return nil
	}
	return []string{state.Confirmable}
}

// storeOptions are the flags of commands that speak with the store itself.
type storeOptions struct {
	file    string // the configuration of a balancer
	timeout time.Duration
	// only of import
	replace       bool
	dryRun        bool
	allowRemovals bool
	// only of export
	cache bool
}

func (o *storeOptions) addFlags(cmd *cobra.Command) {
	configFlag(cmd, &o.file)
	cmd.Flags().DurationVar(&o.timeout, "timeout", time.Minute, "how long to wait for the store")
}

// load reads the configuration file of a balancer. It returns an error if the file has no store.
func (o *storeOptions) load(in io.Reader) (*config.BalancerFiles, error) {
	text, name, err := cli.ReadInput(in, o.file)
	if err != nil {
		return nil, err
	}
	files, _, err := config.ParseBalancerFiles(text)
	if problems, ok := errors.AsType[fieldpath.Errors](err); ok {
		return nil, problems.In(name)
	} else if err != nil {
		return nil, err
	}
	if files.File.Store == nil {
		return nil, fmt.Errorf("%s: has no section store", name)
	}
	return files, nil
}

// openStore returns a connection to the store of a balancer.
func openStore(files *config.BalancerFiles) (*store.Store, error) {
	return store.Open(&files.File.Store.Etcd, files.File.Node.Name)
}

func newStoreImport() *cobra.Command {
	var o storeOptions
	cmd := &cobra.Command{
		Use:   "import -c FILE SERVICES",
		Short: "Fill the store with the services of a file",
		Long: `Fill the store that FILE names. FILE is the configuration file of a balancer. SERVICES is a
file with the section services, such as the configuration file of a balancer without a store,
or the output of "segue store export". Of its other sections, only overrides has an effect.

The store must be empty, unless --replace is given. With --replace, import replaces the
services in the store. It replaces the overrides only if SERVICES has the section overrides.
It also replaces or removes keys with invalid values. Import makes one transaction: no
balancer follows a part of it. FILE or SERVICES can be -, which means standard input.`,
		Example: "  segue store import -c /etc/segue/lb.yaml services.yaml\n" +
			"  segue store import -c /etc/segue/lb.yaml services.yaml --replace --dry-run",
		RunE: func(cmd *cobra.Command, args []string) error {
			return importStore(cmd, args[0], &o)
		},
	}
	o.addFlags(cmd)
	services := cli.Arguments("SERVICES")
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if o.file == "" {
			return fmt.Errorf("%s: missing -c FILE", cli.CommandName(cmd))
		}
		if err := services(cmd, args); err != nil {
			return err
		}
		if o.file == cli.StandardInput && args[0] == cli.StandardInput {
			return fmt.Errorf("%s: FILE and SERVICES cannot both be standard input", cli.CommandName(cmd))
		}
		return nil
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.replace, "replace", false, "replace the services of a store that is not empty")
	flags.BoolVar(&o.dryRun, "dry-run", false, "show what would change, and change nothing")
	flags.BoolVar(&o.allowRemovals, "allow-removals", false,
		"remove servers even if they are more than the limit of the store (store.max-removed-percent)")
	return cmd
}

// importStore fills the store with the services of the file at path, and prints the changes.
func importStore(cmd *cobra.Command, path string, o *storeOptions) error {
	out := cmd.OutOrStdout()
	files, err := o.load(cmd.InOrStdin())
	if err != nil {
		return err
	}
	s, err := openStore(files)
	if err != nil {
		return err
	}
	defer s.Close()
	text, name, err := cli.ReadInput(cmd.InOrStdin(), path)
	if err != nil {
		return err
	}
	content, warnings, err := config.ParseContent(files, text)
	if problems, ok := errors.AsType[fieldpath.Errors](err); ok {
		return problems.In(name)
	} else if err != nil {
		return err
	}
	for _, warning := range warnings {
		fmt.Fprintln(out, "warning:", warning)
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), o.timeout)
	defer cancel()
	var changes desired.Changes
	change := store.Change{
		Fills: !o.replace, Replaces: o.replace, PermitsRemovals: o.replace && o.allowRemovals,
		DryRun: o.dryRun, Who: events.User(uint32(os.Getuid())),
		Edit: func(before store.Tree) (after store.Tree, err error) {
			after, changes, err = imported(files, before, content)
			return after, err
		},
	}
	if !o.allowRemovals {
		change.Check = control.CheckRemovals(files.File, false)
	}
	version, err := s.Apply(ctx, change)
	switch {
	case errors.Is(err, store.ErrNotEmpty):
		return fmt.Errorf("%w; --replace replaces its services", err)
	case errors.Is(err, store.ErrUnknown):
		return fmt.Errorf("%w: look with segue store export before you repeat it", err)
	}
	if err != nil {
		return err
	}
	for _, line := range changes.Lines() {
		if o.dryRun {
			line = "dry run: " + line
		}
		fmt.Fprintln(out, line)
	}
	if !o.dryRun {
		services := wording.Count(len(content.Services), "service")
		fmt.Fprintf(out, "the store has version %s: %s\n", version, services)
	}
	return nil
}

// imported returns the content of a store after an import, and how this changes the desired state
// of a balancer. The store keeps its overrides if the imported content has no section overrides. If
// a balancer cannot follow the content before the import, all imported services count as new.
func imported(
	files *config.BalancerFiles, before store.Tree, content *config.Content,
) (store.Tree, desired.Changes, error) {
	after, err := (&store.Document{Services: content.Services, Overrides: content.Overrides}).Tree()
	if err != nil {
		return nil, nil, err
	}
	if content.Overrides == nil {
		after = after.WithOverridesOf(before)
	}
	next, err := balancerWith(files, after)
	if err != nil {
		return nil, nil, err
	}
	earlier, err := balancerWith(files, before)
	if err != nil {
		earlier = &desired.Balancer{Node: next.Node}
	}
	return after, next.ChangesFrom(earlier), nil
}

// balancerWith returns the desired state of a balancer that follows the content of a store.
func balancerWith(files *config.BalancerFiles, content store.Tree) (*desired.Balancer, error) {
	document, err := content.Document()
	if err != nil {
		return nil, err
	}
	stored, _, err := config.WithStored(files, document.Services, document.Overrides)
	if err != nil {
		return nil, err
	}
	return stored.Desired, nil
}

func newStoreExport() *cobra.Command {
	var o storeOptions
	cmd := &cobra.Command{
		Use:   "export -c FILE",
		Short: "Print the services and overrides of the store",
		Long: `Print the services and overrides of the store that FILE names. FILE is the configuration file
of a balancer. "segue store import" can read the output. If FILE is -, export reads standard
input.

With --cache, export reads a file in node.state instead of the store. There the balancer on
this host keeps the services and overrides that it has followed last. With this output, you
can fill a store that has lost its content.`,
		Example: "  segue store export -c /etc/segue/lb.yaml >services.yaml\n" +
			"  segue store export -c /etc/segue/lb.yaml --cache >services.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return exportStore(cmd, &o)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().BoolVar(&o.cache, "cache", false, "print what the balancer on this host has followed last")
	return cmd
}

// exportStore prints the content of the store, or of the file in node.state, as YAML.
func exportStore(cmd *cobra.Command, o *storeOptions) error {
	files, err := o.load(cmd.InOrStdin())
	if err != nil {
		return err
	}
	read := storedTree
	if o.cache {
		read = cachedTree
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), o.timeout)
	defer cancel()
	tree, err := read(ctx, files)
	if err != nil {
		return err
	}
	document, err := tree.Document()
	if err != nil {
		return err
	}
	content := config.Content{Services: document.Services, Overrides: document.Overrides}
	text, err := content.YAML()
	if err != nil {
		return err
	}
	_, err = cmd.OutOrStdout().Write(text)
	return err
}

// storedTree returns the newest content of the store.
func storedTree(ctx context.Context, files *config.BalancerFiles) (store.Tree, error) {
	s, err := openStore(files)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	newest, err := s.Read(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the store: %w", err)
	}
	if err := newest.Check(); err != nil {
		return nil, err
	}
	return newest.Tree(), nil
}

// cachedTree returns the content that the balancer on this host has followed last. It needs neither
// the store nor the credentials for it.
func cachedTree(_ context.Context, files *config.BalancerFiles) (store.Tree, error) {
	node := &files.File.Node
	path, prefix := store.CacheFile(node.State, node.Instance), store.Prefix(&files.File.Store.Etcd)
	state, err := store.LoadCache(path, prefix)
	if err != nil {
		return nil, err
	}
	if state == nil {
		return nil, fmt.Errorf("%s: missing, or of another fleet than %s", path, prefix)
	}
	return state.Content, nil
}

// awaitServices waits until a balancer knows its services: from the store, or from its own file of
// the last state that it followed. Until then, every few seconds, it logs and records why it waits,
// and asks systemd for more time. The data path of an earlier process keeps forwarding packets.
func awaitServices(
	ctx context.Context, fleet *control.Fleet, recorder *rundir.Recorder, log *slog.Logger,
) error {
	return fleet.First(ctx, func(s store.Status) {
		recorder.SetStore(recordOf(s))
		reason := s.Held
		if !s.Reachable {
			reason = s.Problem
		}
		log.Warn("waits for the services: nothing of the store is known; an attached data path continues",
			"reason", reason)
		// Otherwise systemd would end the process, because its start takes too long.
		extend := fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", startExtension.Microseconds())
		_ = daemon.Notify("STATUS=waits for the store: " + reason + "\n" + extend)
	})
}

// startExtension is how long systemd continues to wait for the start after each notice that the
// balancer waits for the store.
const startExtension = 30 * time.Second

// recordOf returns the condition of the store for the record of the process.
func recordOf(s store.Status) rundir.Store {
	state := api.StoreOf(s)
	return rundir.Store{Version: orNone(state.Follows), Problems: problemsOf(&state)}
}

// recordStore puts the condition of the store into the record of the process after each change of
// the condition, and publishes the change as events. It returns when the context ends.
func recordStore(
	ctx context.Context, fleet *control.Fleet, recorder *rundir.Recorder, stream *events.Stream,
) {
	before := store.Status{Reachable: true}
	for {
		now := fleet.Status()
		recorder.SetStore(recordOf(now))
		publishStore(stream, before, now)
		before = now
		if fleet.Await(ctx, func(s store.Status) bool { return s != now }) != nil {
			return
		}
	}
}

// publishStore publishes an event for each difference between two conditions of the store.
func publishStore(stream *events.Stream, before, now store.Status) {
	switch {
	case before.Reachable && !now.Reachable:
		stream.Publish(events.Event{Kind: events.StoreDown, Reason: now.Problem})
	case !before.Reachable && now.Reachable:
		stream.Publish(events.Event{Kind: events.StoreUp})
	}
	switch {
	case now.Held != before.Held && now.Held != "":
		stream.Publish(events.Event{Kind: events.StoreHeld, Reason: now.Held})
	case now.Held != before.Held: // nothing is held any more
		stream.Publish(events.Event{Kind: events.StoreFollowed})
	}
}

// storeMetrics exports the condition of the store.
type storeMetrics struct{ fleet *control.Fleet }

var (
	storeReachable = prometheus.NewDesc("segue_lb_store_reachable",
		"1 if the store of the fleet answers, otherwise 0.", nil, nil)
	storeFollowed = prometheus.NewDesc("segue_lb_store_followed",
		"1 if the balancer follows the store, 0 if it keeps an earlier state or cannot follow the newest version.", nil, nil)
	storeWaiting = prometheus.NewDesc("segue_lb_store_waiting",
		"1 if the balancer has not started, because it knows no services of the store yet, otherwise 0.", nil, nil)
	storeWaitingSince = prometheus.NewDesc("segue_lb_store_waiting_since_timestamp_seconds",
		"Unix time since when the balancer waits for its services. It is absent when it has them.", nil, nil)
	storeVersion = prometheus.NewDesc("segue_lb_store_change",
		"The number of the last change: followed by the balancer, or the newest of the store.",
		[]string{"state"}, nil)
	storeLeader = prometheus.NewDesc("segue_lb_store_leader",
		"1 if this balancer makes the generations of the fleet, otherwise 0.", nil, nil)
)

func (storeMetrics) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		storeReachable, storeFollowed, storeWaiting, storeWaitingSince, storeVersion, storeLeader,
	} {
		descriptions <- d
	}
}

func (m storeMetrics) Collect(metrics chan<- prometheus.Metric) {
	s := m.fleet.Status()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(storeReachable, number(s.Reachable))
	waits := s.Follows == (store.Version{}) // it has followed no version yet
	gauge(storeFollowed, number(!waits && s.Held == "" && !s.FromCache))
	gauge(storeWaiting, number(waits))
	if waits {
		gauge(storeWaitingSince, float64(s.Begun.UnixNano())/float64(time.Second))
	}
	gauge(storeVersion, float64(s.Follows.Change), "followed")
	gauge(storeVersion, float64(s.Newest.Change), "newest")
	gauge(storeLeader, number(s.IsLeader))
}

// number returns the value of a gauge that is true or false.
func number(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
