// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/announce"
	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/bgp"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/l2"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/version"
)

func newLB() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "lb -c FILE",
		Short: "Run a balancer",
		Long: `Run a balancer in the foreground.

On SIGHUP the balancer reads its configuration and its overrides again. It refuses
an invalid file and keeps the running configuration. When the process ends, the data
path stays in the kernel and keeps forwarding packets. The next start takes the data
path over without losing a packet. "segue lb detach" removes the data path.`,
		Example: "  segue lb -c /etc/segue/lb.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDaemon(cmd, func(ctx context.Context, f *foreground) error {
				return runLB(ctx, file, f)
			})
		},
	}
	keptFileFlag(cmd, &file)
	logFlag(cmd)
	cmd.AddCommand(newDetach(datapath.RoleBalancer, detachLB))
	return cmd
}

// runLB runs a balancer until the context ends.
func runLB(ctx context.Context, file string, f *foreground) error {
	log := f.log
	controller, warnings, err := control.LoadBalancer(file)
	if err != nil {
		return err
	}
	cfg := controller.Desired()
	logWarnings(log, warnings)
	logInvalid(log, controller.Invalid())
	lock, err := lockInstance(cfg.Node.Instance)
	if err != nil {
		return err
	}
	defer unlockInstance(lock, cfg.Node.Instance)
	removeLeft(log, replacedFiles(&cfg.Node)...)
	metrics, err := daemon.ListenMetrics(cfg.Metrics.Listen, "segue_lb", log)
	if err != nil {
		return err
	}
	defer metrics.Close()
	socket, err := api.Listen(cfg.Node.Instance, cfg.API.Group, log)
	if err != nil {
		return err
	}
	defer socket.Close()
	recorder := rundir.NewRecorder(lock, string(datapath.RoleBalancer), file, cfg.Fixed(), log)
	defer recorder.Close()
	fleet, err := controller.Join(ctx, log)
	if err != nil {
		return err
	}
	handler := api.NewStarting(controller)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return socket.Run(ctx, handler) })
	// A balancer with a store serves the store's metrics while it waits for the store. It adds the
	// data path's metrics later. Without a store, it serves no metrics before it has all of them.
	serveMetrics := sync.OnceFunc(func() { group.Go(func() error { return metrics.Run(ctx) }) })
	if fleet != nil {
		defer fleet.Close()
		metrics.MustRegister(storeMetrics{fleet})
		serveMetrics()
		if err := awaitServices(ctx, fleet, recorder, log); err != nil {
			return err
		}
		cfg = controller.Desired()
	}
	announcer, err := newAnnouncer(cfg, controller.Secrets(), f.hidesPins, log)
	if err != nil {
		return err
	}
	link, err := newLink(cfg, fleet, log)
	if err != nil {
		return err
	}
	b, err := balancer.NewShared(cfg, controller.Secrets(), controller.Generations(), log)
	if err != nil {
		return err
	}
	defer b.Close()
	collector, err := b.Collector()
	if err != nil {
		return err
	}
	defer collector.Close()
	metrics.MustRegister(collector, b.Polls(), b.HeldFragments())
	view, err := b.View()
	if err != nil {
		return err
	}
	defer view.Close()
	stream := events.NewStream()
	stream.Publish(events.Event{Kind: events.Started, Reason: "version " + version.String()})
	b.PublishTo(stream)
	b.ReportUntried(recorder.SetUnchecked)
	b.ReportUnsaved(recorder.SetUnsaved)
	b.ReportReasons(recorder.SetReasons)
	var member control.Member = b
	switch {
	case announcer != nil:
		member = &announced{b, bgpFollower{announcer}, log}
	case link != nil:
		member = &announced{b, l2Follower{link}, log}
	}
	controller.Attach(member, recorder.SetOverrides)
	reload := tracked(metrics, recorder, stream, log, controller.Reload)
	if fleet != nil {
		group.Go(func() error { recordStore(ctx, fleet, recorder, stream); return nil })
	}
	var speaker api.Speaker
	if announcer != nil {
		speaker = announcer
		announcer.PublishTo(stream)
		metrics.MustRegister(announcer)
		group.Go(func() error { return announcer.Run(ctx, b.Abilities()) })
	}
	var onLink api.Link
	if link != nil {
		onLink = link
		link.PublishTo(stream)
		metrics.MustRegister(link)
		group.Go(func() error { return link.Run(ctx, b.Abilities()) })
	}
	var offload api.Switch
	if contents := b.Contents(); contents != nil {
		follower := p4switch.NewFollower(cfg.Node.Switch, log)
		offload = follower
		recorder.SetSwitch(cfg.Node.Switch)
		metrics.MustRegister(follower)
		group.Go(func() error { return follower.Run(ctx, contents) })
	}
	serveMetrics()
	group.Go(func() error {
		// Before the balancer runs, a request for a change would have to wait.
		select {
		case <-b.Ready():
			handler.Start(api.Balancer{
				Control: controller, Source: view.List, Reload: reload, Events: stream, Speaker: speaker,
				Link: onLink, Switch: offload,
			}.Handler())
		case <-ctx.Done():
		}
		return nil
	})
	group.Go(func() error {
		detach := f.detachCommand("lb", cfg.Node.Instance)
		return daemon.Serve(ctx, b, reloadBySignal(reload), f.hangups, detach, log)
	})
	return group.Wait()
}

// replacedFiles returns the files that a balancer's process replaces by renaming a temporary file.
// If the process dies, it may leave the temporary files.
func replacedFiles(node *desired.BalancerNode) []string {
	files := []string{rundir.RecordFile(node.Instance)}
	if node.State == "" {
		return files
	}
	return append(files, (&desired.Balancer{Node: *node}).OverridesFile(), string(announce.DrainFileOf(node)),
		serversets.File(node.State, node.Instance), store.CacheFile(node.State, node.Instance))
}

// newAnnouncer returns the announcer of a balancer's VIPs, or nil if the configuration has no
// section bgp. hidesPins tells whether the data path ends with the process.
func newAnnouncer(
	cfg *desired.Balancer, secrets desired.Secrets, hidesPins bool, log *slog.Logger,
) (*bgp.Announcer, error) {
	if cfg.BGP == nil {
		return nil, nil
	}
	return bgp.New(cfg, bgp.NewPlan(cfg.BGP, secrets.Passwords), bgp.Forwarding{
		EndsWithProcess: hidesPins,
		Works:           func() (bool, error) { return forwards(&cfg.Node) },
	}, log)
}

// newLink returns the speaker that answers for a balancer's VIPs on its link, or nil if the
// configuration has no section l2. fleet is nil if the balancer has no store.
func newLink(cfg *desired.Balancer, fleet *control.Fleet, log *slog.Logger) (*l2.Speaker, error) {
	if cfg.L2 == nil {
		return nil, nil
	}
	var presence l2.Presence
	if fleet != nil {
		presence = fleet.Present
	}
	return l2.New(cfg, presence, log)
}

// forwards tells whether the data path of a balancer is attached to all interfaces of its
// configuration.
func forwards(node *desired.BalancerNode) (bool, error) {
	attachments, err := datapath.ReadAttachments(node.Instance)
	attached := 0
	for _, a := range attachments {
		if a.Interface != "" { // an interface in this network namespace
			attached++
		}
	}
	return attached >= len(node.Interfaces()), err
}

// announced is a balancer with the announcer of its VIPs. Both follow the same desired state.
type announced struct {
	control.Member
	announcer interface {
		apply(context.Context, *desired.Balancer, desired.Secrets) error
	}
	log *slog.Logger
}

// bgpFollower makes an announcer follow a desired state.
type bgpFollower struct{ *bgp.Announcer }

func (f bgpFollower) apply(ctx context.Context, cfg *desired.Balancer, secrets desired.Secrets) error {
	return f.Apply(ctx, bgp.NewPlan(cfg.BGP, secrets.Passwords))
}

// l2Follower makes a speaker follow a desired state.
type l2Follower struct{ *l2.Speaker }

func (f l2Follower) apply(ctx context.Context, cfg *desired.Balancer, _ desired.Secrets) error {
	return f.Apply(ctx, cfg.L2)
}

// Reload implements control.Runner.
func (a *announced) Reload(ctx context.Context, cfg *desired.Balancer, secrets desired.Secrets) error {
	return a.Follow(ctx, cfg, secrets, nil)
}

// Follow implements control.Member. First the data path follows the desired state, and then the
// announcer.
func (a *announced) Follow(
	ctx context.Context, cfg *desired.Balancer, secrets desired.Secrets, shared serversets.Generations,
) error {
	if err := a.Member.Follow(ctx, cfg, secrets, shared); err != nil {
		return err // for example because the section bgp or l2 was removed, which needs a restart
	}
	// The data path follows the new state already. So the announcer must follow it even if the
	// caller's context ends. An error means that the process is ending, or that a peer's session
	// cannot be opened. The announcer tries again to open the session.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), applyTimeout)
	defer cancel()
	if err := a.announcer.apply(ctx, cfg, secrets); err != nil {
		a.log.Error("the announcement of vips does not follow the configuration", "error", err)
	}
	return nil
}

// applyTimeout is how long the announcer may take to follow a change. It takes long only if the
// process is ending.
const applyTimeout = 10 * time.Second

// detachLB removes the data path of a balancer. If the balancer's process was killed, it has also
// left managed neighbour entries and the routes of its health checks. detachLB releases these
// entries, and removes these routes.
func detachLB(instance string) error {
	attachments, _ := datapath.ReadAttachments(instance) // newDetach reports the error
	errs := []error{dataplane.Detach(instance), nexthop.GiveBack()}
	for _, a := range attachments {
		errs = append(errs, health.RemovePath(dataplane.CheckMark, a.Ifindex))
	}
	errs = append(errs, health.RemoveOrphanPaths(dataplane.CheckMark))
	return errors.Join(errs...)
}

// newDetach returns the command that removes the data path of an instance.
func newDetach(role datapath.Role, detach func(instance string) error) *cobra.Command {
	command := "agent"
	if role == datapath.RoleBalancer {
		command = "lb"
	}
	return &cobra.Command{
		Use:     "detach INSTANCE",
		Short:   "Remove the data path of a stopped " + string(role) + " from the kernel",
		Example: fmt.Sprintf("  segue %[1]s detach %[1]s", command),
		Args:    cli.Arguments("INSTANCE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			instance := args[0]
			if err := datapath.CheckRole(instance, role); err != nil {
				return err
			}
			lock, err := rundir.Lock(instance)
			if err != nil {
				return fmt.Errorf("stop the process first: %w", err)
			}
			attachments, unreadable := datapath.ReadAttachments(instance)
			if err := detach(instance); err != nil {
				_ = lock.Close()
				return err
			}
			if err := rundir.Unlock(lock); err != nil {
				return err
			}
			from := describeDetached(attachments)
			if unreadable != nil {
				from = fmt.Sprintf("; its interfaces are unknown (%v)", unreadable)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "Detached %s %q%s.\n", role, instance, from)
			return err
		},
	}
}

// describeDetached returns the end of a message: the interfaces from which an instance was
// detached.
func describeDetached(attachments []*datapath.Attachment) string {
	if len(attachments) == 0 {
		return ", which was not attached to an interface"
	}
	names := make([]string, len(attachments))
	for i, a := range attachments {
		names[i] = interfaceName(a.Interface, a.Ifindex)
		if a.Interface == "" {
			names[i] += " in another network namespace"
		}
	}
	return " from " + strings.Join(names, " and ")
}
