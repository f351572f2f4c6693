// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/field"
	"github.com/segue-lb/segue/internal/runstate"
)

func newAgent() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "agent -c FILE",
		Short: "Run the agent of a server",
		Long: `Run the agent of a server in the foreground.

On SIGHUP the agent reads its configuration again. It refuses an invalid file and
keeps the running configuration. When the process ends, the data path stays in the
kernel and keeps delivering packets. The next start takes the data path over without
losing a packet. "segue agent detach" removes the data path.`,
		Example: "  segue agent -c /etc/segue/agent.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDaemon(cmd, func(ctx context.Context, f *foreground) error {
				return runAgent(ctx, file, f)
			})
		},
	}
	configFlag(cmd, &file)
	logFlag(cmd)
	cmd.AddCommand(newDetach(datapath.RoleAgent, agent.Detach))
	return cmd
}

func runAgent(ctx context.Context, file string, f *foreground) error {
	log := f.log
	cfg, warnings, err := config.LoadAgent(file)
	if err != nil {
		return err
	}
	logWarnings(log, warnings)
	lock, err := lockInstance(cfg.Node.Instance)
	if err != nil {
		return err
	}
	defer lock.Close()
	metrics, err := daemon.ListenMetrics(cfg.Metrics.Listen, "segue_agent", log)
	if err != nil {
		return err
	}
	defer metrics.Close()
	socket, err := api.Listen(cfg.Node.Instance, cfg.API.Group, log)
	if err != nil {
		return err
	}
	defer socket.Close()
	a, err := agent.New(cfg, log)
	if err != nil {
		return err
	}
	defer a.Close()
	metrics.MustRegister(a)
	recorder := runstate.NewRecorder(lock, string(datapath.RoleAgent), file, cfg.Fixed(), log)
	defer recorder.Close()
	stream := events.NewStream()
	a.PublishTo(stream)
	var reloading sync.Mutex // SIGHUP and the socket must not exchange files
	reload := tracked(metrics, recorder, stream, log, func(ctx context.Context) (field.Errors, error) {
		reloading.Lock()
		defer reloading.Unlock()
		cfg, warnings, err := config.LoadAgent(file)
		if err != nil {
			return nil, err
		}
		return warnings, a.Reload(ctx, cfg)
	})
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return metrics.Run(ctx) })
	group.Go(func() error {
		select { // before, a reload would wait for the agent to run
		case <-a.Ready():
			return serveAgentAPI(ctx, socket, cfg.Node.Instance, reload, stream)
		case <-ctx.Done():
			return nil
		}
	})
	group.Go(func() error {
		return daemon.Serve(ctx, a, withoutWarnings(reload), f.hangups, f.detachCommand("agent", cfg.Node.Instance), log)
	})
	return group.Wait()
}

// serveAgentAPI answers requests until the context ends.
func serveAgentAPI(
	ctx context.Context, socket *api.Socket, instance string, reload api.Reload, stream *events.Stream,
) error {
	view, err := agent.OpenView(instance)
	if err != nil {
		return err
	}
	defer view.Close()
	return socket.Run(ctx, api.Agent{Source: view.Snapshot, Reload: reload, Events: stream}.Handler())
}
